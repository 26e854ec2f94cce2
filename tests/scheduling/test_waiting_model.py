"""The waiting queue agrees with a sorted list under whatever happens to it."""

from __future__ import annotations

import math
from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_ext.contract import Rank
from vllm_ext.contract.room import AdapterPlaces
from vllm_ext.scheduling.engine_state import adapter_of

from .ranks import Ranks


class AgainstASortedList(RuleBasedStateMachine):
    """The queue agrees with a list that is sorted anew for every question."""

    def __init__(self) -> None:
        super().__init__()
        self.r = Ranks()
        self.model: dict[str, Rank] = {}
        self.offered: list[str] | None = None
        self.outside: list[str] = []
        self.now = 0.0
        self.taken: set[str] = set()
        self.apart: set[str] = set()
        self.adapters = AdapterPlaces()

    def _order(self, names: Callable[[str], bool] = lambda name: True) -> list[str]:
        number = list(self.r.requests).index
        ranked = sorted(self.model, key=lambda n: (*self.model[n].key, self.r.requests[n].arrival_time, number(n)))
        return [name for name in ranked if names(name)]

    def _visible(self) -> list[str]:
        return self._order() if self.offered is None else self.offered

    def _could_join(self) -> list[str]:
        return self._order(lambda n: n not in self.apart and self.adapters.fits(adapter_of(self.r.requests[n])))

    @rule(
        key=st.integers(0, 3),
        until=st.sampled_from([1.0, 3.0, math.inf]),
        arrival=st.integers(0, 2),
        adapter=st.integers(0, 3),
    )
    def add(self, key: int, until: float, arrival: int, adapter: int) -> None:
        name = f"r{len(self.r.requests)}"
        self.r.add(name, key, until=self.now + until, arrival=arrival, level=key, adapter=adapter)
        self.model[name] = self.r.ranks[name]

    @precondition(lambda self: self.outside)
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.outside))
        self.outside.remove(name)
        if name in self.taken:
            self.apart.add(name)
        self.r.queue.prepend_requests([self.r.requests[name]])
        self.model[name] = self.r.ranks[name]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.r.queue.remove_requests([self.r.requests[name]])
        del self.model[name]
        self.apart.discard(name)
        if self.offered is not None:
            self.offered = [other for other in self.offered if other != name]
        self.outside.append(name)

    @rule()
    def pop(self) -> None:
        if not (visible := self._visible()):
            assert not self.r.queue
            return
        assert self.r.queue.pop_request().request_id == visible[0]
        del self.model[visible[0]]
        self.apart.discard(visible[0])
        self.taken.add(visible[0])
        if self.offered is not None:
            self.offered = visible[1:]
        self.outside.append(visible[0])

    @precondition(lambda self: self.model)
    @rule(data=st.data(), key=st.integers(0, 3), until=st.sampled_from([1.0, math.inf]))
    def change_behind_its_back(self, data: st.DataObject, key: int, until: float) -> None:
        """The policy would answer differently now; the queue must not notice before it asks."""
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.r.ranks[name] = Rank((float(key),), until_s=self.now + until, level=key)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def rerank(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.r.queue.rerank(self.r.requests[name])
        self.model[name] = self.r.ranks[name]

    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        self.offered = data.draw(st.permutations(sorted(self.model)))[: data.draw(st.integers(0, 5))]
        self.r.queue.offer([self.r.requests[name] for name in self.offered])

    @rule()
    def end_step(self) -> None:
        self.r.queue.end_step()
        self.offered = None
        self.taken.clear()

    @rule(passed=st.sampled_from([0.0, 0.5, 1.0, 5.0]), used=st.sets(st.integers(1, 3)), most=st.integers(1, 3))
    def begin_step(self, passed: float, used: set[int], most: int) -> None:
        self.now += passed
        self.offered = None
        self.taken.clear()
        self.adapters = AdapterPlaces(used, most)
        due = {name for name, rank in self.model.items() if rank.until_s <= self.now}
        for name, rank in self.r.ranks.items():
            if rank.until_s <= self.now:
                self.r.ranks[name] = rank._replace(until_s=self.now + 1.0)
        self.r.asked.clear()
        self.r.queue.begin_step(self.now, self.adapters)
        assert set(self.r.asked) <= due
        assert len(self.r.asked) >= min(len(due), 16)
        for name in self.r.asked:
            self.model[name] = self.r.ranks[name]

    @invariant()
    def agrees(self) -> None:
        queue = self.r.queue
        assert self.r.names() == self._order()
        visible = self._visible()
        assert len(queue) == len(self.model)
        assert bool(queue) == bool(visible)
        if visible:
            assert queue.peek_request().request_id == visible[0]
        assert [x.request_id for x in queue.best(1000)] == self._could_join()
        assert {x.request_id for x in queue.undecided(1000)} == self.apart
        levels: dict[int, int] = {}
        for rank in self.model.values():
            levels[rank.level] = levels.get(rank.level, 0) + 1
        assert queue.levels == levels
        oldest = queue.oldest()
        assert (oldest is None) == (not self.model)
        if oldest is not None:
            assert oldest.arrival_time == min(self.r.requests[n].arrival_time for n in self.model)


TestAgainstASortedList = AgainstASortedList.TestCase
