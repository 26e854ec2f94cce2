"""Clients take turns: the bounds of virtual token counters, by the real scheduler, and what must not break them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from tests.support.steering import Rig
from vllm_ext.config import ConfigError
from vllm_ext.contract import Origin, Rank
from vllm_ext.scheduling import shares as shares_module
from vllm_ext.scheduling.shares import Shares
from vllm_ext.scheduling.waiting_table import WaitingTable
from vllm_ext.simulation.engine.harness import make_request
from vllm_ext.systems.fair import TakeTurns

FAIR = ("fair", "fair+alise", "fair+auto")
LONGEST_PROMPT, MOST_TOKENS = 40, 30 * 16
BOUND = 2 * max(1 * LONGEST_PROMPT, 2 * MOST_TOKENS)
"""Of the paper, Theorem 4.4: with prices of 1 and 2, and all tokens that the KV memory holds."""


def rig(system: str = "fair", **options: Any) -> Rig:
    return Rig(system, options={"sharing": options}, num_blocks=31, max_num_seqs=4, enable_prefix_caching=False)


class Backlog:
    """Clients that always have requests waiting, each of its own kind."""

    def __init__(self, served: Rig, kinds: dict[str, tuple[int, int]]) -> None:
        self.rig, self.kinds = served, kinds
        self.sent: Counter[str] = Counter()
        self.service: Counter[str] = Counter()
        self._seen: dict[str, int] = {}

    def refill(self, *clients: str, depth: int = 3) -> None:
        waiting = Counter(name.split("-")[0] for name in self.rig.waiting)
        for client in clients or self.kinds:
            while waiting[client] < depth:
                prompt, length = self.kinds[client]
                name = f"{client}-{self.sent[client]}"
                self.sent[client] += 1
                waiting[client] += 1
                self.rig.add(name, prompt, length=length, osl=length, tag=client)

    def step(self) -> None:
        """One step; counts what each client got, as the paper does: a prompt when it is admitted, then each token."""
        requests = dict(self.rig.scheduler.requests)
        self.rig.step(seconds=0.01)
        for name, request in requests.items():
            client = name.split("-")[0]
            if name not in self._seen and name not in self.rig.waiting:
                self._seen[name] = 0
                self.service[client] += request.num_prompt_tokens
            if name in self._seen:
                self.service[client] += 2 * (request.num_output_tokens - self._seen[name])
                self._seen[name] = request.num_output_tokens


@pytest.mark.parametrize("system", FAIR)
def test_backlogged_clients_stay_within_the_bound_whatever_they_send(system: str) -> None:
    backlog = Backlog(rig(system), {"short": (4, 3), "long": (LONGEST_PROMPT, 30), "wordy": (4, 60)})
    most = 0
    for _ in range(600):
        backlog.refill()
        backlog.step()
        most = max(most, max(backlog.service.values()) - min(backlog.service[c] for c in backlog.kinds))
    assert most <= BOUND
    assert min(backlog.service[client] for client in backlog.kinds) > 10 * most / 4  # they got far more than that
    assert backlog.sent["short"] > 5 * backlog.sent["wordy"]


def test_without_turns_the_client_that_sends_most_gets_most() -> None:
    backlog = Backlog(rig("fcfs-tuned"), {"one": (4, 10), "many": (4, 7)})
    for _ in range(300):
        backlog.refill("one", depth=2)
        backlog.refill("many", depth=12)
        backlog.step()
    assert backlog.service["many"] > 3 * backlog.service["one"]
    fair = Backlog(rig(), backlog.kinds)
    for _ in range(300):
        fair.refill("one", depth=2)
        fair.refill("many", depth=12)
        fair.step()
    assert abs(fair.service["many"] - fair.service["one"]) <= BOUND / 4


def test_a_weight_is_a_share() -> None:
    backlog = Backlog(rig(weights={"paid": 3, "*": 1}), {"paid": (4, 10), "free": (4, 10)})
    for _ in range(600):
        backlog.refill()
        backlog.step()
    assert backlog.service["paid"] / backlog.service["free"] == pytest.approx(3, rel=0.1)


def test_a_pause_saves_nothing_up_and_costs_nothing() -> None:
    backlog = Backlog(rig(), {"steady": (4, 10), "pausing": (4, 10)})
    for _ in range(50):
        backlog.refill()
        backlog.step()
    for _ in range(200):
        backlog.refill("steady")
        backlog.step()
    before = backlog.service.copy()
    for _ in range(200):
        backlog.refill()
        backlog.step()
    gained = backlog.service - before
    assert abs(gained["pausing"] - gained["steady"]) <= BOUND / 4


def test_an_ordering_decides_among_a_client_s_own_requests_only() -> None:
    served = rig("fair+alise")
    served.add("busy-0", 4, length=40, osl=40, tag="busy")
    for _ in range(4):
        served.add(f"busy-{_ + 1}", 4, length=30, osl=30, tag="busy")
    served.step(1, seconds=0.01)
    served.add("new-long", 30, length=60, osl=60, tag="new")
    served.add("new-short", 4, length=2, osl=2, tag="new")
    served.step(5, seconds=0.01)  # it was lifted to the counter of the other, which grows
    for number in range(3):
        served.add(f"busy-short{number}", 4, length=2, osl=2, tag="busy")
    order = [request.request_id for request in served.scheduler.ranked.best(4)]
    assert order[:2] == ["new-short", "new-long"]  # both before anybody of the client that was served


def test_what_vllm_takes_and_puts_back_is_not_counted() -> None:
    counted = Shares(TakeTurns(), lambda request: request.request_id.split("-")[0], failed, none_cached)
    queue = WaitingTable(lambda _: Rank((0.0,)), lambda r: (r.arrival_time, hash(r.request_id)), None, counted)
    one, other = make_request("a-1", 30), make_request("b-1", 30)
    for request in (one, other):
        queue.add_request(request)
    for _ in range(5):
        queue.prepend_request(queue.pop_request())
    assert counted.counter("a") == counted.counter("b") == 0
    taken = queue.pop_request()
    assert counted.counter(taken.request_id[0]) == 30
    counted.finished(taken, waits=False)
    assert counted.counter(taken.request_id[0]) == 30


def failed() -> None:
    raise AssertionError("a policy failed")


def none_cached(_: Any) -> int:
    return 0


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6))
def test_the_order_is_that_of_taking_one_after_another(seed: int) -> None:
    """What is shown at once is what comes out by taking the best each time, whoever was served or lifted before."""
    rng = random.Random(seed)
    counted = Shares(TakeTurns(), lambda request: request.request_id[0], failed, none_cached)
    ties: dict[str, tuple[float, int]] = {}
    queue = WaitingTable(lambda r: Rank((float(len(r.prompt_token_ids)),)), lambda r: ties[r.request_id], None, counted)
    running: list[Any] = []
    for number in range(60):
        queue.begin_step(float(number))
        kind = rng.random()
        if kind < 0.6 or not len(queue):
            name = f"{rng.choice('abcd')}{number}"
            ties[name] = (float(number), number)
            queue.add_request(make_request(name, rng.randint(1, 30)))
        elif kind < 0.8:
            running.append(queue.pop_request())
        elif running:
            counted.finished(running.pop(rng.randrange(len(running))), waits=False)
    queue.begin_step(100.0)
    shown = [request.request_id for request in queue.best(100)]
    assert len(shown) == len(queue)
    taken = []
    while len(queue):
        least = min(counted.counter(client) for client in {r.request_id[0] for r in queue})
        request = queue.pop_request()
        assert request.num_prompt_tokens + least == pytest.approx(counted.counter(request.request_id[0]))
        taken.append(request.request_id)
    assert taken == shown


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("system", FAIR)
def test_nothing_is_kept_of_requests_that_are_gone(system: str, depth: int) -> None:
    """Little memory: many are preempted, some end or are given up while they wait to come back."""
    served = Rig(system, depth=depth, num_blocks=14, max_num_seqs=6, enable_prefix_caching=False)
    for number in range(40):
        served.add(f"r{number}", 10, length=30 + number % 7, tag=f"c{number % 3}")
        served.step(3, seconds=0.01)
        if number % 5 == 4:
            served.scheduler.finish_requests(f"r{number - 2}", RequestStatus.FINISHED_ABORTED)
    served.drain(seconds=0.01)
    counted = served.scheduler.ranked.shares
    assert served.state["preemptions"]["memory"] > 3
    assert [counted._of, counted._served, counted._waiting, counted._bounds] == [{}] * 4
    assert served.state["sharing"] == {"clients": 0, "spread": 0.0}


def test_clients_without_requests_are_forgotten_the_least_served_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares_module, "MOST_REMEMBERED", 8)
    counted = Shares(TakeTurns(), lambda request: request.request_id, failed, none_cached)
    for number in range(20):
        request = make_request(f"c{number}", 5 + number)
        counted.name(Origin(tag=f"c{number}"))
        counted.joined(request)
        counted.left(request, admitted=True)
        counted.finished(request, waits=False)
    assert len(counted._settled) <= 8
    assert len(counted._weights) <= 8
    assert counted.counter("c19") >= 24


def test_a_policy_that_can_t_tell_whose_it_is_costs_a_step_its_plan_and_no_more() -> None:
    served = rig()
    served.scheduler.policies.sharing.__class__.client, kept = _raises, TakeTurns.client
    try:
        served.add("r0", tag="x")
        served.drain()
    finally:
        TakeTurns.client = kept  # type: ignore[method-assign]
    assert served.state["fallbacks"] == 1
    assert served.record("r0")["output_tokens"] == 8


def _raises(*_: Any) -> str:
    raise RuntimeError("told to")


@pytest.mark.parametrize("by", ["tag", "salt", "adapter", "key"])
def test_clients_are_told_apart_by_what_was_chosen(by: str) -> None:
    assert TakeTurns(by=by).client(Origin("tag", "salt", "adapter", "key")) == by


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"by": "ip"}, "sharing.by"),
        ({"weights": {"a": 0}}, "sharing.weights['a']"),
        ({"weights": {"a": True}}, "sharing.weights['a']"),
        ({"weights": 3}, "sharing.weights"),
        ({"prompt_weight": -1.0}, "sharing.prompt_weight"),
        ({"prompt_weight": 0.0, "output_weight": 0.0}, "sharing.output_weight"),
    ],
    ids=str,
)
def test_a_bad_option_is_named(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match="sharing") as caught:
        TakeTurns(**given)
    assert field in str(caught.value)
