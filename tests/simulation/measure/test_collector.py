"""Books of a run: rows, gaps, areas and events worked out by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from tests.support.simulation_parts import (
    PerTokenCost,
    SteadyCost,
    ask,
    busy_hour,
    crowd,
    make_engine,
    rows,
    simulate,
    token_times,
)
from vllm_ext.simulation.measure.run_data import Events, RunData
from vllm_ext.simulation.spec import RecordSpec
from vllm_ext.simulation.workloads.requests import Slo

STEP = SteadyCost(device=1.0, host=0.25)
_EVENTS = RecordSpec(events=10_000)


def events(data: RunData) -> Events:
    assert data.events is not None
    return data.events


def test_row_of_a_request_worked_by_hand() -> None:
    """Arrives at 0.5 while a runs; scheduled at 1.25, tokens at 2.5, 3.75 and 5."""
    slo = Slo(ttft_s=1.0, e2e_s=9.0)
    asked = [
        ask("a", output=9),
        ask("b", 0.5, 10, 3, priority=2, session_id="s", tier="gold", slo=slo, extra_args={"osl": 4}),
    ]
    data, _ = simulate(asked, STEP, system="fcfs")
    row = rows(data.requests)["b"]
    assert math.isnan(row.pop("slo_tbt_s"))
    assert row == {
        "req_id": "b",
        "session_id": "s",
        "tier": "gold",
        "finish_reason": "stop",
        "prompt_tokens": 10,
        "cached_prompt_tokens": 0,
        "output_tokens": 3,
        "true_output_tokens": 3,
        "predicted_tokens": 4,
        "preemptions": 0,
        "priority": 2,
        "arrival_s": 0.5,
        "first_scheduled_s": 1.25,
        "first_token_s": 2.5,
        "finish_s": 5.0,
        "max_gap_s": 1.25,
        "waited_s": 0.75,
        "slo_ttft_s": 1.0,
        "slo_e2e_s": 9.0,
    }


def test_nobody_predicts_in_vllm_alone() -> None:
    data, _ = simulate([ask("a", extra_args={"osl": 4})])
    assert data.requests.column("predicted_tokens").tolist() == [0]


def test_areas_worked_by_hand() -> None:
    """One seat: a runs 0-2.5; b comes at 0.5 and runs 2.5-3.75. The pool has 63 blocks, each holds one."""
    data, _ = simulate([ask("a", output=2), ask("b", 0.5, output=1)], STEP, max_num_seqs=1)
    assert data.duration_s == 3.75
    assert data.counters["mean_running_requests"] == pytest.approx(3.75 / 3.75)
    assert data.counters["mean_waiting_requests"] == pytest.approx(2.0 / 3.75)
    assert data.counters["mean_kv_used_fraction"] == pytest.approx(1 / 63)
    assert data.counters["max_kv_used_fraction"] == pytest.approx(1 / 63)


def test_every_gap_is_counted_once() -> None:
    data, _ = simulate(busy_hour(), PerTokenCost(), num_blocks=14)
    gaps = np.concatenate([np.diff(moments) for moments in token_times(data.requests).values()])
    assert data.gaps.count == len(gaps) > 100
    assert data.gaps.total_s == pytest.approx(gaps.sum())
    assert data.gaps.max_s == gaps.max()
    assert data.gaps.min_s == gaps.min()


def test_gap_across_a_preemption_is_the_whole_pause() -> None:
    data, _ = simulate(crowd(), STEP, num_blocks=14)
    preempted = [row for row in data.requests.rows() if row["preemptions"]]
    assert preempted
    for row in preempted:
        moments = token_times(data.requests)[row["req_id"]]
        assert row["max_gap_s"] == max(np.diff(moments)) > 1.25


def test_token_times_are_kept_only_when_asked_for() -> None:
    data, _ = simulate([ask("a")], record=RecordSpec())
    assert data.requests.token_times == [None]
    assert data.events is None


def test_states_of_a_request_in_order() -> None:
    data, _ = simulate([ask("a", prompt=70, output=2)], STEP, max_num_batched_tokens=32, record=_EVENTS)
    assert [(event.time_s, event.state) for event in events(data).requests] == [
        (0.0, "waiting"),
        (0.0, "prefill"),
        (3.75, "decode"),
        (5.0, "stop"),
    ]
    assert [(step.start_s, step.end_s, step.prefill_tokens, step.decode_tokens) for step in events(data).steps] == [
        (0.25, 1.25, 32, 0),
        (1.5, 2.5, 32, 0),
        (2.75, 3.75, 6, 0),
        (4.0, 5.0, 0, 1),
    ]


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_preempted_request_decodes_again_after_its_return(depth: int) -> None:
    data, _ = simulate(crowd(), STEP, num_blocks=14, record=_EVENTS, async_scheduling=depth == 2)
    follows = {
        "waiting": {"prefill"},
        "prefill": {"decode", "preempted"},
        "decode": {"preempted", "stop", "length"},
        "preempted": {"prefill", "stop", "length"},
    }
    seen = 0
    for req_id in data.requests.column("req_id").tolist():
        states = [event.state for event in events(data).requests if event.req_id == req_id]
        seen += states.count("preempted")
        for before, after in itertools.pairwise(states):
            assert after in follows[before], states
        assert states[0] == "waiting"
        assert states[-1] in ("stop", "length")
    assert seen == data.counters["preemptions"] > 0
    assert sorted(req_id for step in events(data).steps for req_id in step.preempted) == sorted(
        event.req_id for event in events(data).requests if event.state == "preempted"
    )


def test_requests_that_resume_together_are_noted_in_the_order_of_the_batch() -> None:
    """vLLM names them in a set, whose order changes with the process. A reset of the cache preempts all at once."""
    engine = make_engine([ask(f"r{i}", prompt=5, output=9) for i in range(6)], events=1000)
    scheduler, update = engine.scheduler, engine.scheduler.update_from_output

    def update_and_reset(*args: Any) -> Any:
        outputs = update(*args)
        if engine.collector.steps == 3:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        return outputs

    scheduler.update_from_output = update_and_reset  # type: ignore[method-assign]
    engine.run()
    resumed = [decision.resumed for decision in engine.decisions or () if decision.resumed]
    assert [len(ids) for ids in resumed] == [6]
    found = engine.collector.events
    assert found is not None
    assert tuple(event.req_id for event in found.requests if event.state == "prefill")[6:] == resumed[0]
    assert engine.collector.preemptions == 6


def test_events_beyond_the_bound_are_counted() -> None:
    everything, _ = simulate(busy_hour(), record=_EVENTS)
    few, _ = simulate(busy_hour(), record=RecordSpec(events=7))
    assert (len(events(few).steps), len(events(few).requests)) == (7, 7)
    kept = len(events(everything).steps) + len(events(everything).requests)
    assert events(few).dropped == kept - 14
    assert events(everything).dropped == 0


def test_series_shows_the_state_at_even_distances() -> None:
    data, _ = simulate([ask(f"r{i}", output=20) for i in range(4)], STEP, max_num_seqs=2)
    time_s = data.series.column("time_s")
    assert (np.diff(time_s) > 0).all()
    assert set(data.series.column("running")) <= {0.0, 1.0, 2.0}
    assert data.series.column("waiting")[0] == 2
    for name in ("steps", "prefill_tokens", "decode_tokens", "preemptions"):
        assert (np.diff(data.series.column(name)) >= 0).all()


def test_device_time_is_that_of_the_steps() -> None:
    data, decisions = simulate([ask("a"), ask("b", 0.5)], STEP)
    executed = sum(1 for decision in decisions if decision.scheduled)
    assert data.counters["device_busy_s"] == executed
    assert data.counters["steps"] == len(decisions)
    assert data.counters["empty_steps"] == len(decisions) - executed
