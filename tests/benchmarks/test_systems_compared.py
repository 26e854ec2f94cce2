"""systems_compared.py: ratios that point the right way, goals that can be missed, and a scene that runs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

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


def test_auto_is_held_to_the_owner_of_each_measure_and_to_upstream_tuned(compared: ModuleType) -> None:
    scenes = sys.modules["systems_scenes"]
    scene = scenes.SCENES["streams"]
    values = {"auto": 0.9, "sarathi": 0.95, "upstream tuned": 0.2}
    found = {(scene.name, name): {m.name: value for m in scene.measures} for name, value in values.items()}
    goals = {goal.metric: goal for goal in compared.goals([scene], found)}
    met = goals["streams: every gap within 100 ms, how many times better auto is than sarathi"]
    assert (met.met, met.goal) == (False, 0.98)
    assert goals["streams: every gap within 100 ms, how many times better auto is than upstream tuned"].met
    assert len(goals) == 4, "median TTFT and P99 TBT are shown, not judged"


def test_every_scene_serves_the_same_requests_to_all_systems(compared: ModuleType) -> None:
    scenes = sys.modules["systems_scenes"]
    for scene in scenes.SCENES.values():
        specs = [scene.spec(name, 1, quick=True) for name in scenes.SYSTEMS]
        assert len({spec.workload.model_dump_json() for spec in specs}) == 1
        assert scene.digest([0], quick=True) != scene.digest([1], quick=True)
        owners = {m.owner for m in scene.measures if m.owner}
        assert owners <= set(scenes.SYSTEMS)


def test_systems_of_a_scene_are_simulated_once_and_a_failed_run_is_named(
    compared: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_EXT_CACHE", str(tmp_path))
    scene = sys.modules["systems_scenes"].SCENES["instructions, no objectives"]
    name = scene.measures[0].metric
    ran: list[str] = []

    def point(spec: SimulationSpec) -> dict[str, float]:
        ran.append(spec.engine.system)
        if spec.engine.system == "sarathi" and ran.count("sarathi") == 1:
            raise ArithmeticError("not today")
        return {name: 10.0 + spec.workload.seed}

    monkeypatch.setattr(pools, "simulate_point", point)
    with pytest.raises(SystemExit, match=r"instructions, no objectives, sarathi, seed 0: ArithmeticError: not today"):
        compared.run([scene], ["auto", "sarathi"], [0, 1], 1, quick=True)
    found = compared.run([scene], ["auto", "sarathi"], [0, 1], 1, quick=True)
    assert found == {(scene.name, system): {scene.measures[0].name: 10.5} for system in ("auto", "sarathi")}
    assert sorted(ran) == ["auto", "auto", "sarathi", "sarathi", "sarathi"]
