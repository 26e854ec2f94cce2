"""A run whose scheduler starts from a profile of the hardware that is simulated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.simulation_parts import PerTokenCost, ask, fingerprint, make_engine
from tests.support.simulation_parts import simulate as run_small
from vllm_ext.config import ConfigError
from vllm_ext.simulation.cluster import simulate_cluster
from vllm_ext.simulation.cost.profiled import runtime_model
from vllm_ext.simulation.cost.spec import CostSpec, HardwareSpec, build
from vllm_ext.simulation.cost.step_shape import CostModel
from vllm_ext.simulation.run import simulate
from vllm_ext.simulation.spec import EngineSpec, Limits, RecordSpec, SimulationSpec, checked, limits_of
from vllm_ext.simulation.workloads.spec import WorkloadSpec
from vllm_ext.step_time.profile import Profile, save
from vllm_ext.step_time.runtime import DEFAULT, DEFAULT_TILE_TOKENS, Coefficients, RuntimeModel
from vllm_ext.systems.sarathi import decode_steps_ms

HARDWARE = HardwareSpec(model="opt-13b", device="a100-80")
COST = build(HARDWARE.resolve(), CostSpec())
RECORD = RecordSpec(token_times=True)


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


ENGINE = EngineSpec(system="sarathi", max_num_batched_tokens=2048, max_model_len=4096, max_num_seqs=16, profiled=True)
STEP_MS = partial(decode_steps_ms, runtime=runtime_model(COST, limits_of(ENGINE, HARDWARE.resolve()), 128))


def served(tbt_ms: str | float | None, *, replicas: int = 0, **changed: Any) -> str:
    """The fingerprint of all that a run did whose requests all have this objective."""
    engine = ENGINE.model_copy(update={"options": {"slo": {"tbt_ms": tbt_ms}}, **changed})
    workload = WorkloadSpec(source="sharegpt-like", arrivals="poisson", rate_per_s=12.0, num_requests=40)
    spec = checked(SimulationSpec(engine=engine, hardware=HARDWARE, workload=workload, record=RECORD))
    run = simulate_cluster(spec, replicas=replicas, router="round-robin").whole if replicas else simulate(spec)
    return fingerprint(run, run.decisions or [])


@pytest.mark.parametrize(("text", "times"), [("0.5x", 0.5), ("5x", 5)])
def test_a_multiple_of_a_decode_step_is_the_number_that_it_comes_to(text: str, times: float) -> None:
    assert served(text) == served(STEP_MS(times))


def test_a_multiple_decides() -> None:
    assert served("0.5x") != served("25x")


def test_a_multiple_is_the_same_number_for_every_replica() -> None:
    assert served("0.5x", replicas=2) == served(STEP_MS(0.5), replicas=2)


def test_a_multiple_of_a_class_needs_a_profile_too() -> None:
    said = r"^engine\.options\.slo\.classes\.chat\.tbt_ms='5x': needs step times .* \(--profiled\) or name a profile"
    with pytest.raises(ConfigError, match=said):
        served(None, profiled=False, options={"slo": {"classes": {"chat": {"tbt_ms": "5x"}}}})


def test_a_named_profile_tells_a_multiple(tmp_path: Path) -> None:
    found = Profile(model="org/model", device="Some GPU", vllm_version="0.32.0", num_steps=100, median_error=0.0,
                    p90_error=0.0, coefficients=Coefficients(4e-3, 2e-5, 3e-5, 4e-8, 5e-10))  # fmt: skip
    save(found, path := tmp_path / "profile.json")
    runs = [
        served(None, profiled=False, options={"slo": {"tbt_ms": tbt_ms}, "profile": str(path)})
        for tbt_ms in ("2x", decode_steps_ms(2, RuntimeModel(found.coefficients)))
    ]
    assert runs[0] == runs[1]


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
