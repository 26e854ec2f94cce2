"""A run whose scheduler starts from a profile of the hardware that is simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.simulation_parts import PerTokenCost, ask, make_engine
from tests.support.simulation_parts import simulate as run_small
from vllm_ext.simulation.cost.profiled import runtime_model
from vllm_ext.simulation.cost.spec import CostSpec, HardwareSpec, build
from vllm_ext.simulation.cost.step_shape import CostModel
from vllm_ext.simulation.spec import Limits
from vllm_ext.step_time.runtime import DEFAULT, DEFAULT_TILE_TOKENS

COST = build(HardwareSpec(model="opt-13b", device="a100-80").resolve(), CostSpec())


def started(**options: Any) -> Any:
    return make_engine([], COST, system="fcfs", profiled=True, **options).scheduler


def test_the_model_is_in_place_before_anything_runs() -> None:
    scheduler, expected = started(), runtime_model(COST, Limits(160, 8, 64), 128)
    found = scheduler.tracked.runtime
    assert found.coefficients == expected.coefficients != DEFAULT
    assert found.given == found.coefficients, "recordings know what it started from"
    assert (found.pivot, found.num_observations) == (expected.pivot, 0)
    assert scheduler.observer.timer.sink is found, "steps teach the model that views are made of"
    assert found.tile_tokens == 128 != DEFAULT_TILE_TOKENS


def test_vllm_alone_is_left_as_it_is() -> None:
    requests = [ask(f"r{i}", i / 8, 20, 9) for i in range(20)]
    runs = [run_small(requests, PerTokenCost(), profiled=profiled)[1] for profiled in (False, True)]
    assert runs[0] == runs[1]


def test_two_profiles_are_refused() -> None:
    with pytest.raises(ValueError, match=r"profiled=True: .*options\.profile='auto'"):
        started(options={"profile": "auto"})


@pytest.mark.parametrize("profiled", [False, True])
def test_a_run_asks_for_it(profiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost model of the run is the one that is profiled, and the tile is that of its device."""
    asked: list[tuple[CostModel, Limits, int]] = []

    def noted(original: Callable[[CostModel, Limits, int], Any]) -> Callable[[CostModel, Limits, int], Any]:
        def ask_for(cost: CostModel, limits: Limits, tile_tokens: int) -> Any:
            asked.append((cost, limits, tile_tokens))
            return original(cost, limits, tile_tokens)

        return ask_for

    monkeypatch.setattr("vllm_ext.simulation.run.runtime_model", noted(runtime_model))
    cost = PerTokenCost()
    run_small([ask("a")], cost, system="alise", profiled=profiled)
    assert asked == ([(cost, Limits(160, 8, 64), 128)] if profiled else [])
