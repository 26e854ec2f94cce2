"""Requests that compete by cost over waiting: the order of scores, whatever joins and leaves."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.contract import Ageing, Rank
from vllm_ext.scheduling.waiting_table import WaitingTable
from vllm_ext.simulation.engine.harness import make_request

_AGEING = Ageing(0.5, 1.0)
_LANE = 2 ** (1 / 8)
_COSTS = st.floats(1e-3, 1e4)


class Costs:
    """A queue over requests whose arrivals and costs a test names."""

    def __init__(self) -> None:
        self.ranks: dict[str, Rank] = {}
        self.arrivals: dict[str, tuple[float, int]] = {}
        self.requests: dict[str, Any] = {}
        self.queue = WaitingTable(
            lambda request: self.ranks[request.request_id], lambda request: self.arrivals[request.request_id], _AGEING
        )

    def add(self, name: str, cost: float, arrival: float, key: tuple[float, ...] = (0.0, 1.0)) -> None:
        self.ranks[name] = Rank(key, cost=cost)
        self.arrivals[name] = (arrival, len(self.arrivals))
        self.requests[name] = make_request(name, 3, arrival_time=arrival)
        self.queue.add_request(self.requests[name])

    def order(self, now: float) -> list[str]:
        self.queue.begin_step(now)
        return [request.request_id for request in self.queue.best(1000)]


@given(asked=st.lists(st.tuples(_COSTS, st.floats(0, 100)), min_size=1, max_size=30), now=st.floats(100, 1e4))
def test_nobody_goes_before_one_of_a_score_that_is_lower_by_more_than_a_lane(
    asked: list[tuple[float, float]], now: float
) -> None:
    costs = Costs()
    for number, (cost, arrival) in enumerate(asked):
        costs.add(str(number), cost, arrival)
    found = costs.order(now)
    assert sorted(found) == sorted(costs.requests)
    scores = [_AGEING.score(costs.ranks[name].cost, now - costs.arrivals[name][0]) for name in found]
    for place, score in enumerate(scores):
        assert all(score <= later * _LANE**2 for later in scores[place + 1 :])
    assert costs.queue.peek_request().request_id == found[0]


@given(st.data())
def test_of_equal_costs_the_older_goes_first_whoever_leaves(data: st.DataObject) -> None:
    costs = Costs()
    for number in range(20):
        costs.add(str(number), 7.0, float(number % 5))
    gone = data.draw(st.sets(st.integers(0, 19)))
    for number in gone:
        costs.queue.remove_request(costs.requests[str(number)])
    expected = sorted((n for n in range(20) if n not in gone), key=lambda n: (n % 5, n))
    assert costs.order(50.0) == [str(n) for n in expected]


def test_waiting_outweighs_cost_after_the_stated_time() -> None:
    """A cost of 10 yields to newcomers of cost 1 until it has waited 1 s * 10 ** (1 / 0.5) = 100 s."""
    for waited, first in ((80.0, "cheap"), (120.0, "dear")):
        costs = Costs()
        costs.add("dear", 10.0, 0.0)
        costs.add("cheap", 1.0, waited)
        assert costs.order(waited)[0] == first


def test_a_key_decides_before_scores_and_without_a_cost_goes_by_arrival() -> None:
    costs = Costs()
    costs.add("cheap", 1.0, 0.0)
    costs.add("urgent", 1e4, 9.0, (-1.0, 1.0))
    costs.add("back-late", 0.0, 5.0, (0.0, 0.0))
    costs.add("back-early", 0.0, 2.0, (0.0, 0.0))
    assert costs.order(10.0) == ["urgent", "back-early", "back-late", "cheap"]


def test_what_was_superseded_is_dropped() -> None:
    costs = Costs()
    costs.add("one", 1.0, 0.0)
    for number in range(1000):
        costs.ranks["one"] = Rank((0.0, 1.0), cost=1.0 + number)
        costs.queue.rerank(costs.requests["one"])
    assert len(costs.queue._lines[""][0]) < 200
    assert costs.order(1.0) == ["one"]
