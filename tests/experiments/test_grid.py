"""Scenes x variants x seeds: means, ratios paired by seed, and runs that did not end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.experiments.test_repro import at, runner
from vllm_ext.experiments.grid import Grid, with_extremes
from vllm_ext.experiments.runner import RunFailed
from vllm_ext.simulation.spec import SimulationSpec

GRID = Grid(
    {
        ("light", "ours"): [{"steps": 2.0}, {"steps": 6.0}],
        ("light", "base"): [{"steps": 1.0}, {"steps": 12.0}],
    }
)


def test_ratios_are_paired_by_seed() -> None:
    assert GRID.over("light", "ours", "base", "steps") == [2.0, 0.5]
    assert GRID.mean("light", "ours", "steps") == 4.0
    assert GRID.means({"light": ["steps"]}) == {"ours": {"light.steps": 4.0}, "base": {"light.steps": 6.5}}
    assert with_extremes([2.0, 0.5], ".3f") == "1.250 (0.500..2.000)"


def test_a_metric_that_no_run_has_is_an_error() -> None:
    with pytest.raises(KeyError):
        GRID.mean("light", "ours", "stops")


def counted(spec: SimulationSpec) -> Mapping[str, float]:
    return {"seed": float(spec.workload.seed), "unfinished_requests": float(spec.workload.rate_per_s == 7.0)}


def test_a_grid_runs_each_variant_with_each_seed(tmp_path: Path) -> None:
    specs = {("light", "a"): lambda seed: at(1.0, seed), ("heavy", "a"): lambda seed: at(2.0, seed)}
    grid = runner(tmp_path, counted).grid(specs, [4, 5])
    assert {key: grid.values(*key, "seed") for key in grid.cells} == {key: [4.0, 5.0] for key in specs}


def test_requests_that_did_not_end_are_no_result(tmp_path: Path) -> None:
    specs = {("light", "a"): lambda seed: at(1.0, seed), ("heavy", "a"): lambda seed: at(7.0, seed)}
    with pytest.raises(RunFailed, match=r"^heavy, a, seed 0: 1 requests did not end$"):
        runner(tmp_path, counted).grid(specs, [0])


def test_a_quick_experiment_has_one_seed(tmp_path: Path) -> None:
    quick = runner(tmp_path)
    assert quick.seeds(3) == [0]
    quick.quick, quick.seed = False, 2
    assert quick.seeds(3) == [2, 3, 4]
