"""Shadow mode: what it counts, that it changes nothing of what is served, and what switches it off."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from tests.support.steering import SCRIPT, Job, Rig, play, workload
from vllm_ext.config import ConfigError, parse
from vllm_ext.contract import Rank
from vllm_ext.scheduling.shadow import shadow as shadow_module
from vllm_ext.systems import build

LIMITS: dict[str, Any] = {"num_blocks": 40, "max_num_seqs": 3}


def shadowed(system: str = "fcfs", shadow: str | None = "alise", **limits: Any) -> Rig:
    return Rig(system, options={} if shadow is None else {"shadow": shadow}, **{**LIMITS, **limits})


def shadow_state(rig: Rig) -> dict[str, Any]:
    rig.scheduler.observer.shadow.catch_up()
    found: dict[str, Any] = rig.state["shadow"]
    return found


def served(rig: Rig, jobs: list[Job], aborted: set[str]) -> tuple[Any, ...]:
    """What clients received, the order in which requests ran, and the counters of the system that serves."""
    order: list[list[str]] = []

    def each_step(rig: Rig) -> None:
        order.append(rig.running)
        for req_id in aborted & rig.scheduler.requests.keys():
            if len(order) % 7 == 0:
                rig.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    outputs = play(rig, jobs, each_step=each_step)
    state = {name: part for name, part in rig.state.items() if name not in ("shadow", "policy_s")}
    return outputs, order, state


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    pair=st.sampled_from([("fcfs", "alise"), ("fcfs", "auto"), ("alise", "fcfs"), ("alise-published", "alise")]),
    num_blocks=st.sampled_from([28, 60]),
    depth=st.sampled_from([1, 2]),
)
def test_what_is_served_is_the_same_with_and_without(
    seed: int, pair: tuple[str, str], num_blocks: int, depth: int
) -> None:
    jobs = workload(20, seed=seed, gap=2.0)
    aborted = {job.req_id for job in random.Random(seed).sample(jobs, 3)}
    system, shadow = pair
    with_one, without = (
        shadowed(system, name, num_blocks=num_blocks, max_num_seqs=5, depth=depth) for name in (shadow, None)
    )
    assert served(with_one, jobs, aborted) == served(without, jobs, aborted)
    found = shadow_state(with_one)
    assert found["failures"] == 0
    left = with_one.scheduler.observer.shadow
    assert (len(left._known), len(left._queue), len(left._order)) == (0, 0, 0)
    assert len(jobs) - 3 <= sum(found["outcomes"].values()) <= len(jobs)


def test_a_short_request_behind_long_ones_would_have_started_sooner() -> None:
    rig = shadowed(max_num_seqs=1, num_blocks=200)
    for name, length in (("first", 20), ("long", 100), ("short", 4)):
        rig.add(name, 10, length=length, osl=length)
        rig.step(seconds=0.5)
    rig.drain(seconds=0.5)
    found = shadow_state(rig)
    real, other = found["waits_s"]["real"], found["waits_s"]["shadow"]
    assert found["outcomes"] == {"sooner": 1, "same": 1, "later": 1}
    assert found["overtakes"] == 1
    assert real == pytest.approx(rig.record("long")["queue_s"] + rig.record("short")["queue_s"])
    assert other == pytest.approx(2 * rig.record("long")["queue_s"] + rig.record("short")["e2e_s"]
                                  - rig.record("short")["queue_s"], abs=2.0)  # fmt: skip
    assert found["service_s"] == pytest.approx(sum(rig.record(n)["e2e_s"] - rig.record(n)["queue_s"]
                                                   for n in ("first", "long", "short")))  # fmt: skip


def test_a_policy_that_raises_is_counted_and_switches_the_shadow_off(caplog: pytest.LogCaptureFixture) -> None:
    jobs = workload(20, gap=1.0)
    expected = play(shadowed(shadow=None), jobs)

    def boom(view: object, now: float) -> Rank:
        raise ZeroDivisionError

    SCRIPT.rank = boom
    rig = shadowed(shadow="scripted")
    assert play(rig, jobs) == expected
    assert (rig.state["fallbacks"], rig.state["shadow"]["failures"]) == (0, 1)
    assert sum(rig.state["shadow"]["outcomes"].values()) == 0


def test_requests_that_wait_for_a_grammar_or_their_client_are_left_out() -> None:
    rig = shadowed()
    rig.add("plain", 10, length=3)
    request = rig.scheduler.requests["plain"]
    shadow, tracked = rig.scheduler.observer.shadow, rig.scheduler.tracked["plain"]
    assert list(shadow._known) == ["plain"]
    shadow._known.clear()
    for name, value in (("resumable", True), ("status", RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)):
        before = getattr(request, name)
        setattr(request, name, value)
        shadow.arrived(request, tracked)
        setattr(request, name, before)
    assert not shadow._known


def test_who_waited_for_its_kv_only_takes_a_seat() -> None:
    rig = shadowed()
    rig.add("loads", 10, length=3)
    rig.scheduler.observer.shadow.loaded("loads")
    rig.drain(seconds=0.1)
    assert sum(shadow_state(rig)["outcomes"].values()) == 0


def test_a_better_prediction_counts_in_the_shadow_too() -> None:
    rig = shadowed(max_num_seqs=1)
    for name in ("runs", "a", "b"):
        rig.add(name, 10, length=30)
    rig.scheduler.update_predictions([("b", [2.0] * 5, "retrieval")])
    mine, real = rig.scheduler.observer.shadow._known["b"].tracked, rig.scheduler.tracked["b"]
    assert mine is not real
    assert mine.prediction == real.prediction
    rig.drain(seconds=0.1)


def test_a_replay_that_lags_too_far_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow_module, "_MOST_PENDING", 4)
    rig = shadowed(max_num_seqs=1, num_blocks=200)
    for number in range(8):
        rig.add(f"r{number}", 10, length=30 - number, max_tokens=30 - number)
    rig.step(40, seconds=0.1)
    for number in range(8, 20):
        rig.add(f"r{number}", 10, length=4)
    rig.drain(seconds=0.1)
    found = shadow_state(rig)
    assert found["dropped"] > 0
    assert found["failures"] == 0
    rig.add("later", 10, length=3)
    rig.drain(seconds=0.1)
    assert sum(shadow_state(rig)["outcomes"].values()) > sum(found["outcomes"].values())


def test_the_log_says_once_an_hour_what_the_order_would_have_changed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(shadow_module.logger, "info", lambda text, *args: lines.append(text % args))
    monkeypatch.setattr(shadow_module, "REPORT_S", 60.0)
    rig = shadowed(max_num_seqs=1, num_blocks=200)
    rig.add("idle", 10, length=3)
    rig.drain(seconds=0.02)
    rig.clock.advance(60.0)
    for name, length in (("first", 20), ("long", 100), ("short", 2)):
        rig.add(name, 10, length=length, osl=length)
    rig.drain(seconds=1.0)
    rig.scheduler.observer.shadow.catch_up()
    rig.scheduler.shutdown()
    assert lines[0] == "shadow alise, last hour: 1 requests, nobody waited: no order would change anything"
    assert "it would have been" in lines[-1]
    assert "% lower" in lines[-1]
    assert len(lines) <= 4


@pytest.mark.parametrize(
    ("system", "shadow", "message"),
    [
        (
            "fcfs",
            "sarathi",
            "serves in the order that is served already; systems with another order: accelgen, .*alise",
        ),
        ("fcfs", "fcfs-tuned", "serves in the order that is served already"),
        ("alise", "alise", "serves in the order that is served already"),
        ("fcfs", "alice", "did you mean 'alise'"),
        ("fcfs", "oracle-alise", "true output lengths"),
    ],
)
def test_a_shadow_that_can_tell_nothing_is_refused(system: str, shadow: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        build(parse({"system": system, "shadow": shadow}))
    assert refused.value.field == "shadow"
