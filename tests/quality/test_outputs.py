"""What a model says on kept KV: exact KV changes nothing, worse KV is seen, and the measures by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.little_llama import little_llama, random_rows
from vllm_ext.quality import kv_formats
from vllm_ext.quality.kv_formats import KvFormat
from vllm_ext.quality.outputs import Outputs, UnsupportedModel, changes, exact_kv, outputs


def zeros(values: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(values)


def judged(sequences: int = 3, **formats: KvFormat) -> dict[str, Outputs]:
    return outputs(
        little_llama(), random_rows(sequences, 64), formats, kept_tokens=32, greedy_tokens=16, greedy=formats
    )  # fmt: skip


def by_hand(logprob: float, last: int) -> Outputs:
    greedy = torch.tensor([[1] * 32, [1] * 30 + [last, 1]])
    return Outputs(logprobs=torch.full((2, 3), logprob).double(), top=greedy[:, -3:], greedy=greedy)


def test_exact_kv_says_what_the_whole_sequence_says() -> None:
    found, rows = judged(exact=kv_formats.exact)["exact"], random_rows(3, 64)
    with torch.no_grad():
        whole = little_llama()(input_ids=rows).logits.double().log_softmax(-1)
    expected = whole[:, 32:-1].gather(-1, rows[:, 33:, None])[..., 0]
    torch.testing.assert_close(found.logprobs, expected, atol=1e-5, rtol=0)
    assert torch.equal(found.top, whole[:, 32:-1].argmax(-1))
    assert torch.equal(found.greedy[:, 0], whole[:, 32].argmax(-1))


def test_a_format_that_returns_its_input_changes_nothing_and_one_that_returns_zeros_does() -> None:
    made = judged(sequences=10, exact=kv_formats.exact, same=torch.clone, nothing=zeros)
    same = changes(made["same"], made["exact"], 0)
    assert same["perplexity_change_percent"] == same["logprob_change_max_abs_nats"] == 0
    assert same["greedy_same_share"] == same["greedy_same_16_tokens_share"] == same["top_token_same_share"] == 1
    assert same["greedy_before_first_difference_min_tokens"] == 16
    nothing = changes(made["nothing"], made["exact"], 0)
    assert nothing["logprob_change_mean_abs_nats"] > 1e-3
    assert nothing["greedy_same_share"] < 1


def test_kv_of_a_format_is_used_by_no_other() -> None:
    """A cache that two formats share would grow: each gets KV of its own."""
    first = judged(nothing=zeros, exact=kv_formats.exact)["exact"]
    second = judged(exact=kv_formats.exact)["exact"]
    assert torch.equal(first.logprobs, second.logprobs)


def test_measures_by_hand() -> None:
    found = changes(by_hand(math.log(0.24), 2), by_hand(math.log(0.25), 1), 0)
    assert found["perplexity"] == pytest.approx(1 / 0.24)
    assert found["logprob_mean_nats"] == pytest.approx(math.log(0.24))
    parts = ("perplexity_change_percent", "perplexity_change_low_percent", "perplexity_change_high_percent")
    assert [found[part] for part in parts] == pytest.approx([100 / 24] * 3), "both sequences change alike"
    assert found["top_token_same_share"] == pytest.approx(5 / 6)
    assert (found["top_token_same_low_share"], found["top_token_same_high_share"]) == pytest.approx((2 / 3, 1))
    assert found["greedy_same_share"] == pytest.approx(63 / 64)
    assert found["greedy_before_first_difference_min_tokens"] == 30
    assert (found["greedy_same_16_tokens_share"], found["greedy_same_32_tokens_share"]) == (1.0, 0.5)
    assert "greedy_same_64_tokens_share" not in found


def test_formats_for_which_nothing_is_generated_have_no_greedy_measures() -> None:
    formats = {"exact": kv_formats.exact, "other": kv_formats.bfloat16}
    progress: list[int] = []
    made = outputs(
        little_llama(), random_rows(9, 64), formats, kept_tokens=32, greedy_tokens=2, greedy=["exact"],
        progress=progress.append,
    )  # fmt: skip
    assert made["exact"].greedy.shape == (9, 2)
    assert not any(name.startswith("greedy") for name in changes(made["other"], made["exact"], 0))
    assert progress == [1, 2, 3, 4], "two batches, two formats"


def test_a_model_whose_cache_is_not_of_all_tokens_is_refused() -> None:
    windowed = little_llama(layer_types=["sliding_attention"] * 2, sliding_window=8)
    with pytest.raises(UnsupportedModel, match="of 32 tokens"):
        exact_kv(windowed, random_rows(1, 32))
