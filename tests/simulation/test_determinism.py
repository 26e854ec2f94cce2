"""Invariant 9 for the simulator: the same run gives the same bytes, whatever the wall clock says."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.run_digests import digest
from tests.support.simulation_parts import SteadyCost, ask, busy_hour, make_engine, simulate
from vllm_ext.contract import Rank, RequestView, Room, Step
from vllm_ext.prediction.oracle import HIDDEN_LENGTH_KEY
from vllm_ext.systems import System, register
from vllm_ext.systems.alise import Preemptive, RemainingTimeLevels

_CLOCKS = ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns", "process_time")
_SYSTEMS = ("upstream-fcfs", "upstream-priority", "fcfs", "alise", "oracle-alise")
_DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])


@pytest.fixture
def mad_clock() -> Iterator[list[str]]:
    """Clocks that leap forth and back by hours, also where modules imported them by name; lists who asked."""
    asked: list[str] = []
    leaps = itertools.cycle([0.0, 1e5, -3e4, 7e5, 12.0])
    with pytest.MonkeyPatch.context() as patch:
        for name in _CLOCKS:
            real, unit = getattr(time, name), 10**9 if name.endswith("_ns") else 1

            def mad(real: object = real, unit: int = unit, name: str = name) -> float:
                asked.append(name)
                now = real()  # type: ignore[operator]
                return now + type(now)(next(leaps) * unit)

            for module in [m for key, m in sys.modules.items() if key.partition(".")[0] in ("vllm", "vllm_ext")]:
                for attribute in [key for key, value in vars(module).items() if value is real]:
                    patch.setattr(module, attribute, mad)
            patch.setattr(time, name, mad)
        yield asked


@_DEPTHS
@pytest.mark.parametrize("system", _SYSTEMS)
def test_same_run_twice_gives_the_same_bytes(system: str, depth: int) -> None:
    assert digest(system, depth) == digest(system, depth)


def test_fingerprint_tells_runs_apart() -> None:
    later = busy_hour()
    later[-1].arrival_s += 2.0**-10
    found = {digest("fcfs", 1), digest("fcfs", 2), digest("alise", 1), digest("fcfs", 1, later)}
    assert len(found) == 4


@_DEPTHS
@pytest.mark.parametrize("system", ["upstream-fcfs", "fcfs", "alise", "oracle-alise"])
def test_no_wall_clock_reaches_a_decision(system: str, depth: int, request: pytest.FixtureRequest) -> None:
    expected = digest(system, depth)
    asked = request.getfixturevalue("mad_clock")
    assert digest(system, depth) == expected
    assert asked, "nobody looked at the clock: the test shows nothing"


# --- what policies are told -------------------------------------------------------------------------------------------

SEEN_TIMES: list[float] = []
SEEN_VIEWS: list[RequestView] = []


@dataclass(frozen=True, kw_only=True)
class RecordingOrder(RemainingTimeLevels):
    def rank(self, request: RequestView, now: float) -> Rank:
        SEEN_TIMES.append(now)
        SEEN_VIEWS.append(request)
        return super().rank(request, now)


@dataclass(frozen=True, kw_only=True)
class RecordingAdmission(Preemptive):
    def select(self, step: Step, room: Room) -> None:
        SEEN_TIMES.append(step.now)
        SEEN_VIEWS.extend(candidate.request for candidate in step.waiting())
        SEEN_VIEWS.extend(victim.request for victim in step.victims())
        super().select(step, room)


register(System(name="test-sim-recorder", ordering=RecordingOrder, admission=RecordingAdmission))


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    SEEN_TIMES.clear()
    SEEN_VIEWS.clear()


@_DEPTHS
def test_policies_see_virtual_times_only(depth: int) -> None:
    """Steps of 1.25 s and arrivals at quarters: every moment a policy may see is a quarter, too."""
    asked = [ask(f"r{i}", 0.25 * i, output=4 + i % 3, max_tokens=30) for i in range(12)]
    data, _ = simulate(asked, SteadyCost(device=1.0, host=0.25), system="test-sim-recorder", max_num_seqs=3,
                       async_scheduling=depth == 2)  # fmt: skip
    assert len(set(SEEN_TIMES)) > 10
    assert sorted(SEEN_TIMES) == SEEN_TIMES
    assert all(now % 0.25 == 0 and 0 <= now <= data.duration_s for now in SEEN_TIMES)
    moments = {row["arrival_time"] for row in (view._asdict() for view in SEEN_VIEWS)}
    assert all(moment % 0.25 == 0 for moment in moments)


@_DEPTHS
def test_hidden_length_is_not_visible_before_the_end(depth: int) -> None:
    """Two runs that differ in one true length only show policies the same until the shorter one ends."""

    def seen(output: int) -> list[RequestView]:
        SEEN_VIEWS.clear()
        asked = [ask("a", output=output), ask("b", 0.5, output=9), ask("c", 0.5, output=9)]
        simulate(asked, system="test-sim-recorder", max_num_seqs=2, async_scheduling=depth == 2)
        return list(SEEN_VIEWS)

    short, long = seen(6), seen(50)
    same = next(i for i, (one, other) in enumerate(zip(short, long, strict=False)) if one != other)
    assert same > 10
    assert max(view.num_output_tokens for view in long[:same] if view.req_id == "a") >= 4


@pytest.mark.parametrize("system", ["fcfs", "alise", "test-sim-recorder", "upstream-fcfs"])
def test_hidden_length_is_in_no_request_of_a_system_that_must_not_know_it(system: str) -> None:
    built = requests_of(system)
    assert [request.sampling_params.extra_args for request in built] == [None, {"osl": 5}]
    assert all(7777 not in vars(request).values() for request in built)


def test_oracle_gets_the_hidden_length_and_keeps_the_clients_hints() -> None:
    built = requests_of("oracle-alise")
    assert [request.sampling_params.extra_args for request in built] == [
        {HIDDEN_LENGTH_KEY: 7777},
        {"osl": 5, HIDDEN_LENGTH_KEY: 7777},
    ]


def requests_of(system: str) -> list[object]:
    """What reaches the scheduler of two requests with a hidden length of 7777."""
    asked = [ask("a", output=7777), ask("b", output=7777, extra_args={"osl": 5})]
    engine = make_engine(asked, system=system)
    built: list[object] = []
    add = engine.scheduler.add_request

    def note_and_add(request: object) -> None:
        built.append(request)
        add(request)

    engine.scheduler.add_request = note_and_add  # type: ignore[method-assign]
    engine.run()
    return built
