"""`benchmarks/simulated/step_grid.py`: steps that were timed on a GPU, and constants that are fitted to them."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module as script
from pathlib import Path

import pytest

from vllm_ext.simulation.cost.devices import find_device
from vllm_ext.simulation.cost.roofline import Roofline

H200 = find_device("h200")


def test_cells_become_steps_of_a_kind() -> None:
    steps = script("step_grid").read(script("step_grid").MEASURED)
    assert {step.kind for step in steps} == {*script("step_grid")._KINDS}
    (one,) = [step for step in steps if step.shape.num_tokens == step.shape.num_prefill_tokens == 8192]
    assert one.kind == "prompts of more"
    assert one.seconds == pytest.approx(0.1926, abs=0.001)
    (long,) = [step for step in steps if step.shape.num_requests == 1 and step.shape.decode_context_tokens > 16_000
               and not step.shape.num_prefill_tokens]  # fmt: skip
    assert long.kind == "decodes alone"


def test_constants_of_a_device_that_obeys_the_model_are_found_again() -> None:
    grid = script("step_grid")
    cost = Roofline(grid.MODEL, replace(H200, weight_efficiency=0.6, memory_efficiency=0.7))
    steps = [step._replace(seconds=cost.device_s(step.shape)) for step in grid.read(grid.MEASURED)]
    found = grid.fitted(steps, H200)
    assert (found.weight_efficiency, found.memory_efficiency) == pytest.approx((0.6, 0.7), abs=0.01)


def test_each_fifth_is_judged_by_constants_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, seen = script("step_grid"), []
    steps = grid.read(grid.MEASURED)
    monkeypatch.setattr(grid, "fitted", lambda those, device: seen.append(those) or device)
    assert grid.crossed(steps, H200) == pytest.approx(grid.errors(steps, H200))
    assert [len(those) for those in seen] == [40, 41, 41, 41, 41]
    assert all(not {*steps[first::5]} & {*those} for first, those in enumerate(seen))


def test_the_result_has_the_rows_of_the_page(tmp_path: Path) -> None:
    script("step_grid").main(["--out", str(tmp_path / "out.json")])
    result = json.loads((tmp_path / "out.json").read_text())
    assert [row[0] for row in result["config"]["rows"]] == ["all", *script("step_grid")._KINDS]
    assert result["metrics"]["all.device table_median_error"] < 0.05
