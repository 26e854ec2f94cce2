"""Templates that drop what was thought: `auto` finds as much as the better of the fixed settings, with the real books.

The scene is the benchmark's (`benchmarks/simulated/dead_branches.py`): 60 conversations of 6 turns.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_ext.config.kv_tier import EARLY

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "simulated"
SEEDS = (0, 1)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("dead_branches")


@functools.cache
def turns(thought: int, seed: int) -> list[Any]:
    return list(importlib.import_module("dead_branches").conversations(thought, seed))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("thought", [0, 600])
@pytest.mark.parametrize("capacity", [400, 800, 1600])
def test_auto_is_within_5_percent_of_the_better_fixed_setting(
    scene: ModuleType, capacity: int, thought: int, seed: int
) -> None:
    prompts, everything, auto, early = (
        scene.found_share(turns(thought, seed), setting, capacity)
        for setting in (
            scene.Setting(prompt_only=True),
            scene.Setting(prompt_only=False),
            scene.Setting(),
            scene.Setting(store=EARLY),
        )
    )
    better, worse = max(prompts, everything), min(prompts, everything)
    assert (prompts > everything) == (thought > 0)
    assert worse < 0.97 * better, "the scene tells the settings apart"
    assert auto >= 0.95 * better
    assert early >= 0.93 * better, "what a running request generated is there until it ends"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("capacity", [400, 800, 1600])
def test_to_evict_abandoned_branches_first_is_nowhere_worse(scene: ModuleType, capacity: int, seed: int) -> None:
    for thought in (0, 600):
        for prompt_only in (False, "auto"):
            settings = [scene.Setting(prompt_only=prompt_only, dead_first=dead) for dead in (True, False)]
            first, in_turn = (scene.found_share(turns(thought, seed), setting, capacity) for setting in settings)
            assert first >= in_turn
            if thought and prompt_only is False:
                assert first > 1.005 * in_turn
