"""Whatever arrives, ends, is aborted or dies: no node runs twice or before its inputs, and no request is lost."""

from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.cellular.graphs_of import cells, chain, compiled, layers, translation, tree
from vllm_ext.cellular.graphs import CellGraph, Output
from vllm_ext.cellular.layout import CompiledGraph
from vllm_ext.cellular.order import ArrivalOrder, SlackOrder
from vllm_ext.cellular.scheduler import Scheduler, Task

trees = st.recursive(st.integers(0, 9), lambda part: st.tuples(part, part), max_leaves=9)
graphs = st.one_of(
    st.builds(chain, st.integers(1, 7)),
    st.builds(translation, st.integers(1, 4), st.integers(1, 7)),
    st.builds(tree, trees),
    st.builds(layers, st.lists(st.booleans(), min_size=1, max_size=5), st.integers(1, 3)),
)


class Expected:
    """What one request has to go through, kept the slow way."""

    def __init__(self, graph: CellGraph, made: CompiledGraph, first: int, seed: int) -> None:
        self.inputs = [
            {source.node for source in node.inputs.values() if isinstance(source, Output)} for node in graph.nodes
        ]
        self.subgraph, self.first = made.subgraph, first
        self.bound = [node.times for node in graph.nodes]
        rng = np.random.default_rng(seed)
        self.true = [
            int(rng.integers(1, times + 1)) if node.cell == "decoder" or node.exits else times
            for node, times in zip(graph.nodes, self.bound, strict=True)
        ]
        self.exits = [node.exits and bool(rng.random() < 0.4) for node in graph.nodes]
        """Whether the node ends the request; else it goes on to its bound."""
        self.true = [
            times if node.exits and not exits else true
            for node, times, true, exits in zip(graph.nodes, self.bound, self.true, self.exits, strict=True)
        ]
        self.left = False
        self.submitted, self.executed = [0] * len(self.bound), [0] * len(self.bound)

    def over(self, node: int) -> bool:
        return self.executed[node] >= self.true[node]


class Serving(RuleBasedStateMachine):
    """Three workers run tasks in the order of submission; a reference checks each of them."""

    @initialize(
        max_batch=st.integers(1, 5),
        min_batch=st.integers(1, 3),
        order=st.sampled_from([ArrivalOrder, SlackOrder]),
        few=st.sampled_from([0, 2, 99]),
    )
    def start(self, max_batch: int, min_batch: int, order: type, few: int) -> None:
        self.table = cells(max_batch=max(max_batch, min_batch), min_batch=min_batch)
        self.freed: list[int] = []
        self.scheduler = Scheduler(self.table, self.freed.append, order=order(), max_tasks_to_submit=3)
        self.scheduler._few = few
        self.lists: dict[int, deque[Task]] = {worker: deque() for worker in range(3)}
        self.requests: dict[int, Expected] = {}
        self.running: dict[int, int] = {}
        self.entered = self.ended = 0
        self.now = 0.0

    @rule(
        several=st.lists(graphs, min_size=1, max_size=3), seed=st.integers(0, 99), slo=st.sampled_from([0.1, 3.0, 1e9])
    )
    def add(self, several: list[CellGraph], seed: int, slo: float) -> None:
        made = [compiled(graph, self.table) for graph in several]
        for number, graph, one in zip(
            self.scheduler.add(made, None, [self.now + slo] * len(made)), several, made, strict=True
        ):
            assert number not in self.requests, "the number of a request that is not over"
            self.requests[number] = Expected(graph, one, number, seed)
            self.entered += 1

    @rule(worker=st.integers(0, 2))
    def schedule(self, worker: int) -> None:
        self.now += 0.01
        if self.lists[worker]:
            return
        tasks = self.scheduler.schedule(worker, self.now)
        for task in tasks:
            self.check_submitted(task)
            self.lists[worker].append(task)

    def check_submitted(self, task: Task) -> None:
        assert 0 < len(task.nodes) <= self.table.cells[task.cell].max_batch
        assert len(np.unique(task.nodes)) == len(task.nodes), "a node twice in a task"
        for node in task.nodes.tolist():
            request = int(self.scheduler.table.request[node])
            expected, own = self.requests[request], node - request
            assert expected.submitted[own] < expected.bound[own], "more often than it may be"
            for source in expected.inputs[own]:
                same = expected.subgraph[source] == expected.subgraph[own]
                before = expected.submitted[source] >= expected.bound[source] or expected.over(source)
                assert before if same else expected.over(source), "before its inputs"
                if same and not expected.over(source):
                    assert self.running[source + request] == task.worker, "its inputs are computed elsewhere"
            if expected.submitted[own] > expected.executed[own]:
                assert self.running[node] == task.worker, "the execution before is elsewhere"
            expected.submitted[own] += 1
            self.running[node] = task.worker

    @precondition(lambda self: any(self.lists.values()))
    @rule(worker=st.integers(0, 2))
    def complete(self, worker: int) -> None:
        if not self.lists[worker]:
            return
        task = self.lists[worker].popleft()
        ended = np.zeros(len(task.nodes), bool)
        for place, node in enumerate(task.nodes.tolist()):
            expected = self.requests.get(int(self.scheduler.table.request[node]))
            if expected is None or expected.over(node - expected.first):
                continue  # aborted, or has ended: the worker leaves it out
            own = node - expected.first
            expected.executed[own] += 1
            if expected.over(own) and self.table.cells[task.cell].until is not None:
                ended[place] = expected.exits[own] or not self.scheduler.table.exits[node]
                expected.left |= expected.exits[own]
        for request in self.scheduler.complete(task, ended):
            expected = self.requests.pop(request)
            assert expected.left or all(expected.over(node) for node in range(len(expected.true)))
            self.ended += 1
        assert not any(expected.left for expected in self.requests.values())

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.requests)))
        self.scheduler.abort(request)
        del self.requests[request]
        self.ended += 1

    @rule(worker=st.integers(0, 2))
    def die(self, worker: int) -> None:
        on_it = {int(r) for task in self.lists[worker] for r in self.scheduler.table.request[task.nodes]}
        lost = self.scheduler.worker_died(worker)
        assert {*lost} <= on_it
        for request in lost:
            del self.requests[request]
            self.ended += 1
        self.lists[worker].clear()

    @invariant()
    def requests_are_neither_lost_nor_doubled(self) -> None:
        if hasattr(self, "requests"):
            assert self.entered == self.ended + len(self.requests)

    def teardown(self) -> None:
        if not hasattr(self, "requests"):
            return
        for _ in range(10_000):
            if not self.requests and not any(self.lists.values()):
                break
            for worker in self.lists:
                self.schedule(worker)
                self.complete(worker)
        assert not self.requests, "requests are left and nothing is scheduled for them"
        assert len(self.freed) == self.entered
        assert not any(map(len, self.scheduler.queues))
        assert not any(self.scheduler.running_tasks)


TestServing = Serving.TestCase
