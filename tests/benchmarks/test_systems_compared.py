"""systems_compared.py: ratios that point the right way, goals that can be missed, and a scene that runs."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from vllm_ext.experiments.grid import Grid
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep import pools


@pytest.fixture
def compared() -> ModuleType:
    return importlib.import_module("systems_compared")


def test_a_margin_above_1_is_better_whichever_direction_better_is(compared: ModuleType) -> None:
    scenes = sys.modules["systems_scenes"]
    assert compared.margin(scenes.NORMALISED, 49.0, 99.0) == pytest.approx(2.0)
    assert compared.margin(scenes.NORMALISED, 99.0, 49.0) == pytest.approx(0.5)
    assert compared.margin(scenes.ATTAINMENT, 0.79, 0.39) == pytest.approx(2.0)
    assert compared.margin(scenes.EVICTIONS, 0.0, 0.0) == 1.0


def test_auto_is_held_to_the_owner_of_each_measure_and_to_vllms_best_setting(compared: ModuleType) -> None:
    scene = sys.modules["systems_scenes"].SCENES["streams"]
    values = {"auto": 0.9, "sarathi": 0.95, "upstream": 0.1, "upstream, watermark": 0.2, "upstream, 256 tokens": 0.6}
    grid = Grid({("streams", name): [{m.metric: value for m in scene.measures}] for name, value in values.items()})
    claims = {claim.name: claim for claim in compared.claims(grid)}
    met = claims["streams: every gap within 100 ms, how many times better auto is than sarathi"]
    assert (met.met, met.goal) == (False, 0.98)
    better = claims["streams: every gap within 100 ms, how many times better auto is than vLLM tuned"]
    assert (better.met, better.value) == (True, pytest.approx(0.91 / 0.61, abs=1e-4))
    assert len(claims) == 4, "median TTFT and P99 TBT are shown, not judged"
    met, _duration = compared.summary(grid, "streams")
    assert met[2:] == ["0.1", "0.6 (256 tokens)", "`sarathi` 0.95", "0.9"]


def test_vllm_is_tuned_by_a_scenes_first_measure_whichever_direction_better_is(compared: ModuleType) -> None:
    values = {"upstream": 0.0, "upstream, watermark": 7.0, "upstream, 128 tokens": 5.0, "auto": 1.0}
    scenes = sys.modules["systems_scenes"].SCENES
    for name, best in (("streams", "upstream, watermark"), ("chats, no objectives", "upstream, 128 tokens")):
        metric = scenes[name].measures[0].metric
        grid = Grid({(name, system): [{metric: value}] for system, value in values.items()})
        assert compared.tuned(grid, name) == best


def test_every_scene_serves_the_same_requests_to_all_systems(compared: ModuleType) -> None:
    scenes = sys.modules["systems_scenes"]
    for scene in scenes.SCENES.values():
        specs = [scene.spec(name, 1, quick=True) for name in scenes.SYSTEMS]
        assert len({spec.workload.model_dump_json() for spec in specs}) == 1
        owners = {m.owner for m in scene.measures if m.owner}
        assert owners <= set(scenes.SYSTEMS)


def test_a_failed_run_is_named_and_the_same_command_goes_on_with_it(
    compared: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_EXT_CACHE", str(tmp_path / "cache"))
    scenes = sys.modules["systems_scenes"]
    name = "instructions, no objectives"
    (measure,) = scenes.SCENES[name].measures
    for module in (scenes, compared):
        monkeypatch.setattr(module, "SCENES", {name: scenes.SCENES[name]})
        monkeypatch.setattr(
            module,
            "SYSTEMS",
            {one: scenes.SYSTEMS[one] for one in ("auto", "alise", "upstream", "upstream, watermark")},
        )
    ran: list[str] = []

    def point(spec: SimulationSpec) -> dict[str, float]:
        ran.append(spec.engine.system)
        if spec.engine.system == "alise" and ran.count("alise") == 1:
            raise ArithmeticError("not today")
        return {measure.metric: 10.0 + spec.workload.seed, "unfinished_requests": 0.0}

    monkeypatch.setattr(pools, "simulate_point", point)
    out = tmp_path / "result.json"
    argv = ["--quick", "--seed", "3", "--jobs", "1", "--out", str(out)]
    simulated = sys.modules["simulated"]
    with pytest.raises(SystemExit, match=rf"{name}, alise, seed 3: ArithmeticError: not today; the same command goes"):
        simulated.main(compared.EXPERIMENT, argv)
    simulated.main(compared.EXPERIMENT, argv)
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["command"].startswith("python benchmarks/simulated/systems_compared.py --quick --seed 3")
    assert result["metrics"] == {f"{name}.{measure.metric}": 13.0}
    assert set(result["baselines"]) == {"alise", "upstream", "upstream, watermark"}
    assert sorted(ran) == ["alise", "alise", "auto", "upstream-fcfs", "upstream-fcfs"]
