"""systems_compared.py: ratios that point the right way, goals that can be missed, and a scene that runs."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest


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


def test_a_run_tells_what_its_scene_looks_at(compared: ModuleType) -> None:
    scenes = sys.modules["systems_scenes"]
    metrics = scenes.metrics_of(scenes.Job("instructions, no objectives", "auto", 0, True))
    assert set(metrics) == {scenes.NORMALISED.metric}
    assert metrics[scenes.NORMALISED.metric] > 0
