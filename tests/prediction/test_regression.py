"""The regression: it finds what is there, says how sure it is, and is the same for the same data."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_ext.prediction import regression
from vllm_ext.prediction.regression import LEAST_EXAMPLES, Examples, Observed, Ridge, fit, last_answers, last_of_each

COUNT, DIM = 1500, 16


def made_up(seed: int = 0, count: int = COUNT, noise: float = 0.4) -> tuple[Examples, Observed]:
    """Log lengths that are linear in the embedding and in the prompt's length."""
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((count, DIM)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    prompt_tokens = rng.integers(5, 2000, count)
    log = 3 + 2 * vectors[:, 0] + 0.3 * np.log1p(prompt_tokens) + noise * rng.standard_normal(count)
    examples = Examples(
        vectors, prompt_tokens, np.full((count, 2), np.nan), np.zeros(count, np.int64), [""] * count, ["m"] * count
    )
    tokens = np.maximum(np.exp(log).round(), 1).astype(np.int64)
    return examples, Observed(tokens, np.zeros(count, np.bool_), np.zeros(count, np.int64))


def fitted(examples: Examples, observed: Observed, **options: Any) -> Ridge:
    found = fit(examples, observed, **{"encoder": "e", "inserted": len(examples), **options})
    assert found is not None
    return found


def test_it_finds_what_is_there_and_its_quantiles_cover_what_they_say() -> None:
    ridge = fitted(*made_up())
    examples, observed = made_up(seed=1)
    said = ridge.log_lengths(examples)
    true = 3 + 2 * examples.vectors[:, 0] + 0.3 * np.log1p(examples.prompt_tokens)
    assert np.abs(said - true).mean() < 0.1
    distributions = ridge.distributions(examples)
    for level in (0.1, 0.5, 0.9):
        covered = np.mean(
            [t <= distribution.quantile(level) for t, distribution in zip(observed.tokens, distributions, strict=True)]
        )
        assert covered == pytest.approx(level, abs=0.05)
    assert all(1 <= distribution.p50 <= distribution.p90 for distribution in distributions)


def test_the_same_data_and_seed_give_the_same_law_and_another_seed_another() -> None:
    one, same, other = (fitted(*made_up(), seed=seed) for seed in (0, 0, 1))
    examples, _ = made_up(seed=2, count=50)
    assert one.distributions(examples) == same.distributions(examples)
    assert one.distributions(examples) != other.distributions(examples)


@pytest.mark.parametrize("copies", [1, 3])
def test_a_prompt_that_came_again_is_not_judged_by_its_own_copies(copies: int) -> None:
    one = made_up(count=100)[0].vectors
    vectors = np.concatenate([one + copy * 1e-7 for copy in range(copies)])  # as of another batch
    held = regression._held_out(vectors, np.random.default_rng(0)).reshape(copies, 100)
    assert (held == held[0]).all()
    assert held[0].sum() == 20


def test_copies_of_few_prompts_judge_each_other() -> None:
    held = regression._held_out(np.repeat(made_up(count=3)[0].vectors, 50, axis=0), np.random.default_rng(0))
    assert held.sum() == 30


def test_there_is_none_of_too_few() -> None:
    examples, observed = made_up(count=LEAST_EXAMPLES)
    assert fit(examples, observed, encoder="e", inserted=0) is not None
    aborted = observed.aborted.copy()
    aborted[0] = True
    assert fit(examples, observed._replace(aborted=aborted), encoder="e", inserted=0) is None


def test_aborted_requests_are_lower_bounds() -> None:
    """Users give up long answers: left out, the rest say that all is short; taken for lengths, too."""
    examples, observed = made_up(count=4000)
    aborted = (observed.tokens > 250) & (np.random.default_rng(3).random(4000) < 0.7)
    cut = np.where(aborted, 250, observed.tokens)
    test, truth = made_up(seed=1)
    long = truth.tokens > 400

    def bias(tokens: Any, flags: Any) -> float:
        ridge = fitted(examples, Observed(tokens, flags, observed.groups))
        return abs(float((ridge.log_lengths(test) - np.log(truth.tokens))[long].mean()))

    censored = bias(cut, aborted)
    assert censored < bias(cut, np.zeros(4000, np.bool_))
    kept = np.flatnonzero(~aborted)
    left_out = fitted(
        replace(
            examples, vectors=examples.vectors[kept], prompt_tokens=examples.prompt_tokens[kept],
            last=examples.last[kept], turns=examples.turns[kept], tags=[""] * len(kept), models=["m"] * len(kept),
        ),
        Observed(cut[kept], aborted[kept], observed.groups[kept]),
    )  # fmt: skip
    assert censored < abs(float((left_out.log_lengths(test) - np.log(truth.tokens))[long].mean()))


def test_a_conversations_last_answers_help() -> None:
    rng = np.random.default_rng(0)
    examples, _ = made_up(count=1200)
    conversations = [b"%d" % (row % 200) for row in range(1200)]
    verbose = rng.normal(4, 1, 200)
    tokens = np.exp(verbose[np.arange(1200) % 200] + 0.3 * rng.standard_normal(1200)).round().clip(1).astype(np.int64)
    observed = Observed(tokens, np.zeros(1200, np.bool_), np.zeros(1200, np.int64))
    last = last_of_each(conversations, observed)
    assert np.isnan(last[:200]).all()
    assert np.isfinite(last[200:]).all()
    knows, not_ = (fitted(replace(examples, last=each), observed) for each in (last, np.full((1200, 2), np.nan)))
    missed = [np.abs(r.log_lengths(replace(examples, last=last)) - np.log(tokens))[200:].mean() for r in (knows, not_)]
    assert missed[0] < 0.5 * missed[1]


def test_last_answers_are_those_before_and_no_aborted_ones() -> None:
    tokens, aborted = np.array([10, 100, 1000, 20]), np.array([False, True, False, False])
    last = last_of_each([b"a", b"a", b"a", b""], Observed(tokens, aborted, tokens))
    np.testing.assert_allclose(last[1], np.log([10, 10]))
    np.testing.assert_allclose(last[2], np.log([10, 10]))
    assert np.isnan(last[[0, 3]]).all()
    assert last_answers([1, 10, 10, 10, 1000]) == pytest.approx((np.log([10, 10, 10, 1000]).mean(), np.log(1000)))


def test_tags_and_models_tell() -> None:
    examples, observed = made_up(noise=0.1)
    short = np.arange(COUNT) % 2 == 0
    tagged = replace(examples, tags=["title" if each else "essay" for each in short])
    ridge = fitted(tagged, observed._replace(tokens=np.where(short, 5, observed.tokens)))
    some = made_up(seed=1, count=20)[0]
    title, essay = (ridge.log_lengths(replace(some, tags=[tag] * 20)).mean() for tag in ("title", "essay"))
    assert essay - title > 1


def test_repeated_prompts_make_the_kernel_narrow_and_vague_likeness_wide() -> None:
    rng = np.random.default_rng(0)
    examples, observed = made_up(count=1500)
    which = rng.integers(100, size=1500)
    own = np.exp(rng.normal(4, 1.5, 100))[which].round().clip(1).astype(np.int64)
    repeated = fitted(replace(examples, vectors=examples.vectors[which]), observed._replace(tokens=own))
    alone = fitted(examples, observed._replace(tokens=rng.permutation(observed.tokens)))
    assert repeated.width in regression._WIDTHS
    assert repeated.width <= alone.width or alone.width == regression._WIDTHS[0]


def test_it_is_kept_whole_for_its_owner_only(tmp_path: Path) -> None:
    ridge = fitted(*made_up())
    path = tmp_path / "r.safetensors"
    ridge.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = Ridge.load(path)
    examples, _ = made_up(seed=1, count=20)
    assert again.distributions(examples) == ridge.distributions(examples)
    assert again[:6] == ridge[:6]


@pytest.mark.parametrize("damage", ["cut", "byte", "other"])
def test_a_damaged_one_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "r.safetensors"
    fitted(*made_up()).save(path)
    whole = bytearray(path.read_bytes())
    if damage == "cut":
        whole = whole[:-8]
    elif damage == "byte":
        whole[-3] ^= 0x40
    else:
        whole = bytearray(bytes(whole).replace(b"ridge 1", b"ridge 9"))
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"r\.safetensors"):
        Ridge.load(path)
