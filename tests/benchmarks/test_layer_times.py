"""`benchmarks/simulated/layer_times.py`: published times of layers, and constants that are fitted to them."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module as script
from pathlib import Path

import pytest

from vllm_ext.simulation.cost.devices import find_device

A100 = find_device("a100-80")


def test_published_layers_are_read_with_their_shapes() -> None:
    layers = script("layer_times").read(script("layer_times").MEASURED)
    assert {layer.device for layer in layers} == {"a100", "h100", "a40"}
    (one,) = [layer for layer in layers
              if (layer.device, layer.model, layer.tokens) == ("a100", "Meta-Llama-3-8B", 4096)]  # fmt: skip
    assert (one.shape.hidden, one.shape.kv_heads, one.shape.ffn, one.shape.layers) == (4096, 8, 14_336, 1)
    assert 0.005 < one.seconds < 0.01, "218 M parameters x 2 x 4096 tokens at 312 TFLOP/s take 5.7 ms"


def test_constants_of_a_device_that_obeys_the_model_are_found_again() -> None:
    benchmark = script("layer_times")
    true = replace(A100, gemm_efficiency=0.6, weight_efficiency=0.7, unhidden=0.4)
    layers = [replace(layer, seconds=benchmark.simulated_s(layer, true))
              for layer in benchmark.read(benchmark.MEASURED) if layer.device == "a100"]  # fmt: skip
    found = benchmark.fitted(layers, A100, benchmark.FITS[benchmark.ALL])
    assert (found.gemm_efficiency, found.weight_efficiency, found.unhidden) == pytest.approx((0.6, 0.7, 0.4), abs=0.02)


def test_each_model_is_judged_by_constants_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = script("layer_times")
    seen: list[set[str]] = []

    def fitted(layers: object, device: object, constants: object) -> object:
        seen.append({layer.model for layer in layers})  # type: ignore[attr-defined]
        return device

    monkeypatch.setattr(benchmark, "fitted", fitted)
    benchmark.main(["--out", str(tmp_path / "out.json")])
    result = json.loads((tmp_path / "out.json").read_text())
    models = {row[1] for row in result["config"]["rows"] if row[0] == "h100"}
    assert seen[-2:] == [models - {"internlm-20b"}] * 2, "the last model of the last device"
    assert len(seen) == 2 * len(result["config"]["rows"])
    by_table = result["metrics"]["device table_median_error"]
    assert {claim["value"] for claim in result["claims"]} == {by_table}, "as nothing was fitted"
