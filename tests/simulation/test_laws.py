"""Laws that hold whatever the scheduler does: conservation, Little's law, and queues with a known mean wait."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.request import Request

from tests.support.audit import audit, audit_drained
from tests.support.simulation_parts import (
    ListWorkload,
    PerTokenCost,
    SteadyCost,
    ask,
    busy_hour,
    crowd,
    make_engine,
    rows,
    simulate,
)
from vllm_ext.simulation.engine.simulated_engine import SimulatedEngine
from vllm_ext.simulation.measure.collector import Collector
from vllm_ext.simulation.measure.run_data import RunData
from vllm_ext.simulation.workloads.requests import SimRequest

SYSTEMS = ("upstream-fcfs", "upstream-priority", "fcfs", "alise", "oracle-alise")
_DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
_SYSTEMS = pytest.mark.parametrize("system", SYSTEMS)


def audited(engine: SimulatedEngine) -> SimulatedEngine:
    """Check the scheduler's books after every step, and run."""
    scheduler, update = engine.scheduler, engine.scheduler.update_from_output

    def update_and_audit(*args: Any) -> Any:
        outputs = update(*args)
        audit(scheduler)
        return outputs

    scheduler.update_from_output = update_and_audit  # type: ignore[method-assign]
    engine.run()
    audit_drained(scheduler)
    return engine


def sojourns(collector: Collector) -> float:
    """Sum of the time requests spent with the server, in seconds."""
    table = collector.table
    return math.fsum(table.column("finish_s") - table.column("arrival_s"))


# --- conservation -----------------------------------------------------------------------------------------------------


@_SYSTEMS
@_DEPTHS
def test_books_of_a_crowded_run_balance(depth: int, system: str) -> None:
    """Little's law: areas under the numbers in the system and in the queue are sums of sojourns and of waits.

    Preempted, aborted and not yet seen requests are included; a request waits from its arrival or preemption until it
    is scheduled. Each has one row, with the tokens it asked for.
    """
    asked, options = busy_hour(), {"num_blocks": 14, "system": system, "async_scheduling": depth == 2}
    collector = audited(make_engine(asked, PerTokenCost(), **options)).collector
    table = collector.table
    assert "abort" in table.column("finish_reason").tolist()
    assert collector.preemptions > 0 or system == "alise"
    assert collector.running_area + collector.waiting_area == pytest.approx(sojourns(collector), rel=1e-12)
    assert collector.waiting_area == pytest.approx(math.fsum(table.column("waited_s")), rel=1e-12)
    assert sorted(table.column("req_id").tolist()) == sorted(request.req_id for request in asked)
    for row in table.rows():
        if row["finish_reason"] != "abort":
            assert row["output_tokens"] == min(row["true_output_tokens"], 40, 160 - row["prompt_tokens"])
    outputs = table.column("output_tokens")
    assert collector.gaps.count == int((outputs - (outputs > 0)).sum())
    data, _ = simulate(asked, PerTokenCost(), **options)
    in_system = data.counters["mean_running_requests"] + data.counters["mean_waiting_requests"]
    assert in_system * data.duration_s == pytest.approx(sojourns(collector), rel=1e-12)


@pytest.mark.parametrize(
    ("system", "depth"), [("upstream-fcfs", 1), ("upstream-priority", 1), ("fcfs", 1), ("upstream-fcfs", 2)]
)
def test_work_is_prompt_plus_output_less_one(system: str, depth: int) -> None:
    """The last token is never computed; without preemption and caching nothing is computed twice.

    Asynchronous scheduling adds a token for each end that was not foreseen.
    """
    asked = [request for request in busy_hour() if request.abort_after_s is None]
    data, _ = simulate(
        asked, PerTokenCost(), num_blocks=128, system=system, async_scheduling=depth == 2, max_num_batched_tokens=256
    )
    assert data.counters["preemptions"] == 0
    unforeseen = sum(
        row["finish_reason"] == "stop" and row["output_tokens"] < min(40, 160 - row["prompt_tokens"])
        for row in data.requests.rows()
    )
    assert unforeseen > 10
    work = data.counters["prefill_tokens"] + data.counters["decode_tokens"]
    expected = sum(row["prompt_tokens"] + row["output_tokens"] - 1 for row in data.requests.rows())
    assert work == expected + (unforeseen if depth == 2 else 0)


@_SYSTEMS
def test_preempted_work_is_computed_again(system: str) -> None:
    engine = make_engine(crowd(), PerTokenCost(), num_blocks=14, system=system)
    scheduler, preempt = engine.scheduler, engine.scheduler._preempt_request
    lost: list[int] = []

    def note_and_preempt(request: Request, *args: Any, **kwargs: Any) -> None:
        lost.append(request.num_computed_tokens)
        preempt(request, *args, **kwargs)

    scheduler._preempt_request = note_and_preempt  # type: ignore[method-assign]
    engine.run()
    collector = engine.collector
    assert sum(lost) > 0
    assert len(lost) == collector.preemptions == int(collector.table.column("preemptions").sum())
    wanted = sum(row["prompt_tokens"] + row["output_tokens"] - 1 for row in collector.table.rows())
    assert collector.prefill_tokens + collector.decode_tokens == wanted + sum(lost)


def test_cached_prefix_is_not_computed_again() -> None:
    """48 of the second prompt's 50 tokens lie in full blocks."""
    ids = tuple(range(100, 150))
    asked = [ask("a", 0.0, 50, 2, token_ids=ids), ask("b", 10.0, 50, 2, token_ids=ids)]
    data, _ = simulate(asked, prefix_caching=True)
    assert [row["cached_prompt_tokens"] for row in data.requests.rows()] == [0, 48]
    assert data.counters["prefill_tokens"] + data.counters["decode_tokens"] == 2 * 51 - 48


# --- queues with known waits ------------------------------------------------------------------------------------------

_QUEUE = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 32}


def single_server(arrivals: Any, **options: Any) -> RunData:
    """One seat, one step of 1 s per request: a queue with constant service."""
    asked = (ask(f"r{i}", float(arrival), 4, 1, max_tokens=1) for i, arrival in enumerate(arrivals))
    data, _ = simulate(list(asked), SteadyCost(), record=None, **{**_QUEUE, **options})
    return data


@pytest.mark.parametrize(("gap_s", "wait_s"), [(1.25, 0.0), (0.5, 0.5)], ids=["below capacity", "above"])
def test_deterministic_queue_never_waits_or_grows_linearly(gap_s: float, wait_s: float) -> None:
    """Every second one goes: where two come in it, number k waits k / 2 s."""
    data = single_server([gap_s * i for i in range(50)])
    assert data.requests.column("waited_s").tolist() == [wait_s * i for i in range(50)]
    assert data.counters["device_busy_s"] == 50


def poisson(rate: float, count: int, seed: int = 7) -> Any:
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


def lindley(arrivals: Any, service_s: float) -> list[float]:
    """Waits by Lindley's recursion: what is left of the wait before, plus its service, when the next one comes."""
    waits = [0.0]
    for gap in np.diff(arrivals):
        waits.append(max(0.0, waits[-1] + service_s - gap))
    return waits


def test_poisson_queue_waits_as_long_as_pollaczek_and_khinchine_say() -> None:
    """M/D/1: rho * S / (2 * (1 - rho)). The interval comes from means of batches long enough to be independent."""
    rho, batches, discarded = 0.6, 30, 500
    arrivals = poisson(rho, 12_500)
    data = single_server(arrivals)
    waits = data.requests.column("waited_s")
    assert waits == pytest.approx(lindley(arrivals, 1.0), abs=1e-6)
    means = waits[discarded:].reshape(batches, -1).mean(axis=1)
    half_width = 3.0 * means.std(ddof=1) / math.sqrt(batches)
    assert half_width < 0.15, "too few requests to tell"
    assert abs(means.mean() - rho / (2 * (1 - rho))) < half_width


def test_shortest_first_waits_as_long_as_first_come_when_all_are_equal() -> None:
    """Whoever goes first, a seat is taken at the same moments. Who goes may differ: ranks are kept while the model of
    step times still learns, so that two equal requests may be estimated a hair apart."""
    arrivals = poisson(0.8, 400)
    first_come, shortest = (single_server(arrivals, system=system).requests for system in ("fcfs", "oracle-alise"))
    starts = [np.sort(table.column("first_scheduled_s")).tolist() for table in (first_come, shortest)]
    assert starts[0] == starts[1]
    waits = [math.fsum(table.column("waited_s")) for table in (first_come, shortest)]
    assert waits[0] == pytest.approx(waits[1], rel=1e-12)


def test_shortest_first_beats_first_come_when_lengths_differ() -> None:
    """Two long ones came first; with true lengths known the short ones overtake those that wait.

    Steps take a second here: without another limit it would soon be the turn of who has waited longest.
    """
    asked = [ask(f"long{i}", 0.0, output=60) for i in range(2)] + [ask(f"short{i}", 0.5, output=2) for i in range(8)]
    mean = {}
    for system, options in (("fcfs", {}), ("oracle-alise", {"ordering": {"age_limit_s": 1e6}})):
        found = simulate(asked, system=system, max_num_seqs=1, options=options)[0].requests
        mean[system] = float(np.mean(found.column("finish_s") - found.column("arrival_s")))
    assert mean["oracle-alise"] < 0.65 * mean["fcfs"]


@_DEPTHS
def test_device_is_never_busier_than_always(depth: int) -> None:
    data, _ = simulate(crowd(), SteadyCost(device=1.0, host=0.25), async_scheduling=depth == 2)
    last_end = max(row["finish_s"] for row in data.requests.rows())
    share = data.counters["device_busy_s"] / last_end
    assert share == pytest.approx(0.8 if depth == 1 else 1.0, abs=0.03)


# --- anything may happen ----------------------------------------------------------------------------------------------


@st.composite
def asked_for(draw: st.DrawFn) -> list[SimRequest]:
    """Requests that arrive together or apart; some leave, some can't be served."""
    found, arrival_s = [], 0.0
    for number in range(draw(st.integers(1, 12))):
        arrival_s += draw(st.sampled_from([0.0, 0.0, 0.015625, 0.1, 1.0]))
        prompt = draw(st.one_of(st.integers(1, 40), st.integers(64, 170)))
        output = draw(st.integers(1, 48))
        osl = draw(st.sampled_from([None, output, 1, 60]))
        found.append(
            ask(
                f"r{number}",
                arrival_s,
                prompt,
                output,
                max_tokens=draw(st.integers(1, 40)),
                priority=draw(st.sampled_from([0, 0, -1, 1])),
                extra_args=None if osl is None else {"osl": osl},
                abort_after_s=draw(st.sampled_from([None, None, None, 0.0, 0.03, 0.25, 2.0])),
            )
        )
    return found


class Again:
    """Some clients ask once more after the end, at once or later."""

    def __init__(self, pauses: list[float | None]) -> None:
        self._pauses = itertools.cycle(pauses)
        self.count = 0

    def __call__(self, request: SimRequest, finished_s: float, output_ids: Any) -> list[SimRequest]:
        pause = None if request.req_id.startswith("again") else next(self._pauses)
        if pause is None:
            return []
        self.count += 1
        return [ask(f"again{self.count}", finished_s + pause, 12, 3)]


@_DEPTHS
@settings(max_examples=25)
@given(
    asked=asked_for(),
    pauses=st.lists(st.sampled_from([None, None, 0.0, 0.5]), min_size=1, max_size=3),
    system=st.sampled_from(SYSTEMS),
    num_blocks=st.sampled_from([11, 14, 30]),
    max_num_seqs=st.sampled_from([1, 3, 8]),
    caching=st.booleans(),
)
def test_any_workload_ends_with_all_books_balanced(
    depth: int,
    asked: list[SimRequest],
    pauses: list[float | None],
    system: str,
    num_blocks: int,
    max_num_seqs: int,
    caching: bool,
) -> None:
    again = Again(pauses)
    engine = make_engine(
        ListWorkload(asked, again),
        PerTokenCost(),
        num_blocks=num_blocks,
        system=system,
        max_num_seqs=max_num_seqs,
        prefix_caching=caching,
        async_scheduling=depth == 2,
    )
    audited(engine)
    collector = engine.collector
    found = rows(collector.table)
    too_long = sum(request.prompt_tokens >= 160 for request in asked)
    assert engine.num_rejected == too_long
    assert len(found) == len(collector.table) == len(asked) - too_long + again.count
    assert not collector.live
    for row, moments in zip(collector.table.rows(), collector.table.token_times, strict=True):
        check_row(row, list(moments or ()))
    assert sum(row["preemptions"] for row in found.values()) == collector.preemptions
    assert collector.running_area + collector.waiting_area == pytest.approx(sojourns(collector), rel=1e-9)
    assert collector.max_kv_used <= 1
    assert min((collector.running_area, collector.waiting_area, collector.kv_area)) >= 0
    assert not engine._lengths


def check_row(row: dict[str, Any], moments: list[float]) -> None:
    """Times in order, tokens as many as said."""
    assert moments == sorted(moments)
    assert len(moments) == row["output_tokens"]
    order = [row["arrival_s"], row["first_scheduled_s"], row["first_token_s"], row["finish_s"]]
    known = [moment for moment in order if not math.isnan(moment)]
    assert known == sorted(known)
    assert 0 <= row["waited_s"] <= row["finish_s"] - row["arrival_s"] + 1e-12
    if row["finish_reason"] != "abort":
        assert row["output_tokens"] >= 1
        assert len(known) == 4
    if len(moments) > 1:
        assert row["max_gap_s"] == max(np.diff(moments))
