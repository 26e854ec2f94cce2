"""Why requests waited. Time passes on a virtual clock, a second a step."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.support.preempting import PREEMPTING
from tests.support.steering import Rig
from vllm_ext.contract.room import AdapterPlaces
from vllm_ext.scheduling.wait_reasons import TRACE_HEADER, Overtaking, WaitReasons
from vllm_ext.simulation.engine.harness import make_request

LOGGED = {"request_log": "unused"}


def rig(system: str | None = "alise", **limits: Any) -> Rig:
    options = {**LOGGED, **limits.pop("options", {})}
    return Rig(system, options=options, **{"max_num_seqs": 1, "num_blocks": 64, **limits})


def waits(of: Rig) -> dict[str, dict[str, Any]]:
    return {record["req_id"]: record["wait"] for record in of.state["records"]}


def test_a_request_says_what_it_lacked_and_who_passed_it() -> None:
    """One seat, held for 8 steps. The long one came first of those that wait; both short ones go before it.

    It is looked at, and refused, only while it is the best that waits.
    """
    served = rig()
    served.add("running", length=8, osl=8)
    served.step(2, seconds=1.0)
    served.add("long", length=60, osl=60)
    served.step(seconds=1.0)
    served.add("short", length=2, osl=2)
    served.add("shorter", length=1, osl=1)
    served.drain(seconds=1.0)
    found = waits(served)
    assert found["running"] == {
        "wait_s": 0.0, "steps": 0, "queued": 0, "ahead": 0, "passed_by": 0,
        "refused": {}, "queue_lacked": {}, "reason": None, "reason_share": None, "preempted": {},
    }  # fmt: skip
    long = found["long"]
    assert (long["queued"], long["ahead"], long["passed_by"]) == (0, 0, 2)
    assert long["wait_s"] == long["steps"] == 9
    assert long["refused"].keys() == {"seats"}
    assert long["queue_lacked"] == {"seats": 7}, "twice the seat became free, and another took it"
    assert long["reason"] in ("seats", "queue")
    assert (found["short"]["queued"], found["short"]["ahead"], found["short"]["passed_by"]) == (1, 0, 1)
    assert (found["shorter"]["queued"], found["shorter"]["ahead"], found["shorter"]["passed_by"]) == (2, 0, 0)
    assert found["shorter"]["refused"] == {"seats": found["shorter"]["steps"]}
    assert (found["shorter"]["reason"], found["shorter"]["reason_share"]) == ("seats", 1.0)


def test_a_request_that_is_short_of_blocks_says_so() -> None:
    served = rig(max_num_seqs=8, num_blocks=20)
    served.add("running", 200, length=10, osl=10)
    served.step(seconds=1.0)
    served.add("large", 200, length=2, osl=2)
    served.drain(seconds=1.0)
    large = waits(served)["large"]
    assert large["refused"] == {"tokens": 2, "blocks": large["steps"] - 2}, "the first prompt takes three steps"
    assert large["steps"] == 12
    assert (large["reason"], large["reason_share"]) == ("blocks", 0.833)


def test_a_preempted_request_waits_twice_and_says_why() -> None:
    served = rig(PREEMPTING, options={"admission": {"gain_ratio": 0.01, "min_progress_tokens": 1}})
    served.add("long", length=60, osl=60)
    served.step(3, seconds=1.0)
    served.add("short", length=3, osl=3)
    served.drain(seconds=1.0)
    long = waits(served)["long"]
    assert long["preempted"] == {"policy": 1}
    assert long["wait_s"] == long["steps"] == 3
    assert long["passed_by"] == 0, "it had run before"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_where_vllm_decides_only_what_is_known_is_told(policy: str) -> None:
    served = rig("fcfs", scheduling_policy=policy)
    for name in ("a", "b", "c"):
        served.add(name, length=2)
    served.drain(seconds=1.0)
    found = waits(served)["c"]
    assert (found["queued"], found["ahead"]) == (2, 2 if policy == "fcfs" else None)
    assert (found["wait_s"], found["steps"], found["passed_by"], found["preempted"]) == (4.0, 4, 0, {})
    assert {found[name] for name in ("refused", "queue_lacked", "reason", "reason_share")} == {None}


def test_a_request_given_up_in_the_queue_says_how_long_it_waited() -> None:
    served = rig()
    served.add("a", length=30, osl=30)
    served.step(seconds=1.0)
    served.add("b", length=30, osl=30)
    served.step(4, seconds=1.0)
    served.loop.abort(["b"])
    found = waits(served)["b"]
    assert (found["wait_s"], found["steps"], found["passed_by"]) == (4.0, 4, 0)
    assert found["refused"] == {"seats": 4}
    served.add("c", length=1, osl=1)
    served.drain(seconds=1.0)
    assert waits(served)["c"]["passed_by"] == 0


def test_nothing_is_kept_unless_somebody_wants_to_know() -> None:
    served = Rig("alise", max_num_seqs=1)
    served.add("a", length=2)
    assert served.scheduler.tracked["a"].wait is None
    served.drain()
    assert waits(served) == {"a": None}


def test_with_traces_what_is_known_goes_along_with_the_headers_of_the_request() -> None:
    served = Rig("alise", max_num_seqs=1)
    observer = served.scheduler.observer
    observer.reasons, observer._traces = WaitReasons(served.scheduler.tracked), True
    served.add("a", length=3, osl=3)
    served.add("b", length=3, osl=3)
    waiting = served.scheduler.requests["b"]
    waiting.trace_headers = {"traceparent": "theirs"}
    served.step(4, seconds=1.0)
    assert waiting.trace_headers["traceparent"] == "theirs"
    told = json.loads(waiting.trace_headers[TRACE_HEADER])
    assert (told["steps"], told["wait_s"]) == (3, 3.0)


def test_steps_without_a_place_for_its_adapter_count_for_those_who_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places for two: 7 is in use all the time, 8 from the third step on. A request without an adapter needs none."""
    tracked = Rig("fcfs", options=LOGGED).scheduler.tracked
    reasons = WaitReasons(tracked)
    reasons.looks = True
    monkeypatch.setattr("vllm_ext.scheduling.wait_reasons.adapter_of", lambda request: int(request.request_id))
    for name in ("0", "7", "8", "9"):
        tracked.add(make_request(name, [1, 2], max_tokens=4), 0.0)
        reasons.came(tracked[name], 0, queued=0, ahead=0)
    for used in ({7}, {7, 3}, {7, 8}, {7, 8}):
        reasons.places(AdapterPlaces(used, 2))
    for name in ("0", "7", "8", "9"):
        reasons.joined(tracked[name], 5)
    found = {name: reasons.told(tracked[name])["refused"] for name in ("0", "7", "8", "9")}  # type: ignore[index]
    assert found == {"0": {}, "7": {}, "8": {"adapters": 1}, "9": {"adapters": 3}}


@pytest.mark.parametrize("seed", range(20))
def test_overtaking_is_what_counting_by_hand_gives(seed: int) -> None:
    rng, overtaking = random.Random(seed), Overtaking()
    waiting: list[int] = []
    ran: list[int] = []
    last = 0
    for _ in range(300):
        if rng.random() < 0.5 or not waiting:
            last += 1
            waiting.append(last)
            overtaking.came(last)
            continue
        number = waiting.pop(rng.randrange(min(4, len(waiting))) if rng.random() < 0.9 else -1)
        by_hand = sum(other > number for other in ran)
        if rng.random() < 0.2:
            assert overtaking.gave_up(number) == by_hand
        else:
            assert overtaking.joined(number) == by_hand
            ran.append(number)
    for number in waiting:
        overtaking.joined(number)
    assert (overtaking._waiting, overtaking._gave_up) == ([], [])
