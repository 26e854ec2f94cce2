"""The benchmark of 8-bit KV: what it trains on, what it compares, and how it judges."""

from __future__ import annotations

import json
from importlib import import_module as script
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_ext.kernels.kv_quant import reference
from vllm_ext.kernels.kv_quant.format import PageLayout

WORDS = "a block of a cache holds keys and values of some tokens\n"


def tiny(**changes: Any) -> Any:
    """A recipe of a model that trains in a second."""
    few = {"layers": 2, "hidden": 64, "intermediate": 64, "heads": 2, "kv_heads": 1, "vocabulary": 300}
    return script("kv_quant_model").Recipe(**few | {"tokens": 64, "batch": 2, "steps": 2, "warmup_steps": 1} | changes)


@pytest.fixture
def little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [WORDS * 200], [WORDS[::-1] * 200], "0" * 64
    monkeypatch.setattr(script("kv_quant_model"), "texts", lambda: many)


def untrained(**changes: Any) -> Any:
    """A model with random weights, and random tokens to judge it by."""
    torch.manual_seed(0)
    model, recipe = script("kv_quant_model"), tiny(**changes)
    tokens = torch.randint(recipe.vocabulary, (8 * recipe.tokens,))
    empty = model._empty(recipe, recipe.vocabulary).eval()
    return model.Trained(recipe=recipe, model=empty, held_out=tokens, facts={"steps": 0.0}, text_sha256="0" * 64)


# --- the model --------------------------------------------------------------------------------------------------------


def test_held_out_files_are_whole_and_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    written = {f"text of page {number}" for number in range(200)}
    for number, text in enumerate(sorted(written)):
        (tmp_path / "docs" / f"page-{number}.md").write_text(text, encoding="utf-8")
    training, held_out, digest = script("kv_quant_model").texts(tmp_path)
    assert 4 < len(held_out) < 30
    assert set(training) | set(held_out) == written
    assert not set(training) & set(held_out)
    assert script("kv_quant_model").texts(tmp_path)[2] == digest


@pytest.mark.usefixtures("little_text")
def test_a_model_is_trained_once_and_comes_back_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = script("kv_quant_model")
    first = model.trained(tiny(), tmp_path)
    assert first.facts["training_tokens_seen"] == 2 * 2 * 64
    assert first.facts["held_out_perplexity"] > 1

    def must_not(*_: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(model, "_train", must_not)
    again = model.trained(tiny(), tmp_path)
    rows = first.held_out[:64][None]
    assert torch.equal(again.model(input_ids=rows).logits, first.model(input_ids=rows).logits)
    with pytest.raises(AssertionError, match="trained again"):
        model.trained(tiny(seed=1), tmp_path)


# --- output -----------------------------------------------------------------------------------------------------------


def test_worse_kv_is_seen() -> None:
    found = untrained(tokens=256)
    quality = script("kv_quant_quality")
    metrics, beside = quality.measure(found, 4, 0)
    assert metrics["logprob_change_mean_abs_nats"] > 0
    assert metrics["judged_tokens"] == 4 * 127
    others = {f"int8_block_{block}" for block in (16, 32, 128)}
    assert set(beside) == {"bf16_kv_against_fp32_kv", quality.HALF, quality.FP8, *others}
    assert 0 < beside[quality.HALF]["logprob_change_mean_abs_nats"] < metrics["logprob_change_mean_abs_nats"]
    assert beside[quality.FP8]["logprob_change_mean_abs_nats"] > 2 * metrics["logprob_change_mean_abs_nats"], (
        "3 bits of 8"
    )


# --- errors and speed -------------------------------------------------------------------------------------------------


def test_errors_of_made_up_values_stay_within_what_is_allowed() -> None:
    error = script("kv_quant_error")
    for name, pages in error.made_up(3, 0).items():
        found = error.measure(pages, error.layout())
        assert 0 <= found["max_error_over_allowed"] <= 1, name
        assert (found["max_abs_error"] == 0) == (name in ("constant", "two_neighbours", "far_from_zero")), name


def test_an_error_beyond_what_is_allowed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    error = script("kv_quant_error")
    exact = reference.dequantise

    def one_too_high(records: Any, pages: torch.Tensor, ids: Any, fmt: Any) -> None:
        exact(records, pages, ids, fmt)
        pages[0, 7] *= 1.1

    monkeypatch.setattr(reference, "dequantise", one_too_high)
    assert error.measure(error.made_up(1, 0)["normal"], error.layout())["max_error_over_allowed"] > 1


@pytest.mark.parametrize("layout", ["cpu", "rows"])
def test_copies_and_8_bits_are_measured_in_turns(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    speed = script("kv_quant_speed")
    monkeypatch.setattr(speed, "_LEAST_BYTES", 1)
    ticks = iter(range(10_000))
    store, load = speed.measure(layout, 32, "warm", 0.5, 3, 0, lambda: float(next(ticks)))
    assert (store.direction, load.direction) == ("store", "load")
    assert store.ratios == load.ratios == (1.0, 1.0, 1.0), "a tick each"
    assert store.bytes == 4 * PageLayout.rows(torch.bfloat16, 8, 128, 32).page_bytes
    assert store.metrics()[f"{layout}_block32_warm_store_time_over_copy"] == 1.0


# --- the whole --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("little_text")
def test_smallest_run_prints_tables_and_one_line_of_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark = script("kv_quant")
    monkeypatch.setattr(benchmark, "QUICK", tiny(tokens=128))
    monkeypatch.setattr(benchmark.speed, "QUICK_MIB", {"cold": 0.5})
    monkeypatch.setattr(benchmark.speed, "_LEAST_BYTES", 1)
    benchmark.main(["--quick", "--models", str(tmp_path / "models"), "--out", str(tmp_path / "out.json")])
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert result == json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert result["metrics"]["block_64_times_smaller_than_bf16"] == pytest.approx(1.8824, abs=1e-4)
    assert {goal["name"] for goal in result["claims"]} == {
        "block_64_times_smaller_than_bf16", "cpu_block32_cold_store_time_over_copy",
        "rows_block32_cold_store_time_over_copy", "worst_error_over_allowed", "perplexity_change_abs_percent",
    }  # fmt: skip
    assert "greedy_same_16_tokens_share" in printed.err
