"""Algorithm 1, worked by hand; orders; what becomes of requests whose worker dies."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cellular.graphs_of import cells, chain, compiled, complete_tree, layers, translation, tree
from vllm_ext.cellular.graphs import CellGraph, CellTable
from vllm_ext.cellular.order import SlackOrder
from vllm_ext.cellular.scheduler import Scheduler, Task
from vllm_ext.experiments.batching.virtual import Arrival, Costs, StepCost, serve

NEVER = 1e9


def enter(scheduler: Scheduler, *graphs: CellGraph, deadline_s: float = NEVER) -> list[int]:
    made = [compiled(graph, scheduler.cells) for graph in graphs]
    return scheduler.add(made, None, [deadline_s] * len(made))


def shown(scheduler: Scheduler, tasks: list[Task]) -> list[tuple[str, int]]:
    return [(scheduler.cells.cells[task.cell].name, len(task.nodes)) for task in tasks]


def run(scheduler: Scheduler, tasks: list[Task], ended: bool | None = None) -> list[int]:
    return [
        request
        for task in tasks
        for request in scheduler.complete(task, None if ended is None else np.full(len(task.nodes), ended))
    ]


def test_requests_join_and_leave_at_every_step() -> None:
    """Figure 2.5: four requests, batches of four; four more come while they run."""
    table = cells(max_batch=4)
    lengths = (2, 3, 3, 5, 5, 7, 3, 1)
    arrivals = [
        Arrival(at_s=0.0 if place < 4 else 0.5, graph=compiled(chain(n), table), lengths={})
        for place, n in enumerate(lengths)
    ]
    served = serve(Scheduler(table, max_tasks_to_submit=1), arrivals, Costs(cells={"step": lambda _: 1.0}))
    assert served.started_s.tolist() == [0, 0, 0, 0, 2, 3, 3, 5]
    assert served.ended_s.tolist() == [2, 3, 3, 5, 7, 10, 6, 6]


def test_a_tree_of_16_leaves_goes_through_as_in_the_paper() -> None:
    """Section 2.4.4: leaves in as many tasks as it takes, then the levels of the tree in successive tasks."""
    scheduler = Scheduler(cells(max_batch=8))
    (request,) = enter(scheduler, tree(complete_tree(16)))
    leaves = scheduler.schedule(0, 0.0)
    assert shown(scheduler, leaves) == [("leaf", 8), ("leaf", 8)]
    assert run(scheduler, leaves[:1]) == []
    assert scheduler.schedule(0, 0.0) == [], "the internal nodes wait for all leaves"
    assert run(scheduler, leaves[1:]) == []
    levels = scheduler.schedule(0, 0.0)
    assert shown(scheduler, levels) == [("internal", 8), ("internal", 4), ("internal", 2), ("internal", 1)]
    assert scheduler.schedule(1, 0.0) == []
    assert run(scheduler, levels) == [request]


def test_a_series_has_at_most_five_tasks_and_ends_when_a_batch_is_below_the_smallest() -> None:
    scheduler = Scheduler(cells(max_batch=4, min_batch=3))
    enter(scheduler, chain(9), chain(2), chain(2), chain(7))
    assert shown(scheduler, scheduler.schedule(0, 0.0)) == [("step", 4), ("step", 4)]
    alone = Scheduler(cells(max_batch=4, min_batch=3))
    enter(alone, chain(9))
    assert shown(alone, alone.schedule(0, 0.0)) == [("step", 1)], "the first task of a series may be small"
    many = Scheduler(cells(max_batch=4))
    enter(many, chain(9))
    assert shown(many, many.schedule(0, 0.0)) == [("step", 1)] * 5


def test_full_cells_go_first_then_those_that_do_not_run_then_any_by_priority() -> None:
    scheduler = Scheduler(cells(max_batch=2), max_tasks_to_submit=1)
    enter(scheduler, chain(3), tree(0), tree(1), tree(2))
    assert shown(scheduler, scheduler.schedule(0, 0.0)) == [("leaf", 2)], "only leaves fill a batch"
    assert shown(scheduler, scheduler.schedule(1, 0.0)) == [("step", 1)], "leaves run already"
    assert shown(scheduler, scheduler.schedule(2, 0.0)) == [("leaf", 1)], "all that is ready and not pinned"


def test_the_decoder_goes_before_the_encoder() -> None:
    scheduler = Scheduler(cells(max_batch=4))
    enter(scheduler, translation(1, 9))
    run(scheduler, scheduler.schedule(0, 0.0))
    enter(scheduler, translation(1, 9))
    assert shown(scheduler, scheduler.schedule(0, 0.0)) == [("decoder", 1)] * 5


def test_a_subgraph_stays_with_its_worker_while_it_runs_there() -> None:
    scheduler = Scheduler(cells(), max_tasks_to_submit=1)
    enter(scheduler, chain(2))
    first = scheduler.schedule(0, 0.0)
    assert scheduler.schedule(1, 0.0) == []
    again = scheduler.schedule(0, 0.0)
    run(scheduler, first)
    assert scheduler.schedule(1, 0.0) == []
    assert len(run(scheduler, again)) == 1
    enter(scheduler, chain(2))
    run(scheduler, scheduler.schedule(0, 0.0))
    assert len(scheduler.schedule(1, 0.0)) == 1, "unpinned when no task of it runs"


def test_a_growing_chain_ends_by_its_output_and_at_its_bound() -> None:
    scheduler = Scheduler(cells(), max_tasks_to_submit=3)
    freed: list[int] = []
    scheduler._on_free = freed.append
    one, two = enter(scheduler, translation(1, 9), translation(1, 4))
    run(scheduler, scheduler.schedule(0, 0.0))
    series = scheduler.schedule(0, 0.0)
    assert [task.nodes.tolist() for task in series] == [[one + 1, two + 1]] * 3
    assert scheduler.complete(series[0], np.array([True, False])) == [one]
    assert freed == [], "tasks with it still run"
    assert scheduler.complete(series[1], np.array([True, False])) == []
    assert scheduler.complete(series[2], np.array([True, False])) == []
    assert freed == [one]
    (last,) = scheduler.schedule(0, 0.0)
    assert last.nodes.tolist() == [two + 1]
    assert scheduler.complete(last, np.array([False])) == [two]
    assert freed == [one, two]


@pytest.mark.parametrize(("few", "exits_at"), [(0, 1), (9, 1), (0, 3), (9, 3)])
def test_a_request_leaves_at_the_node_that_says_so(few: int, exits_at: int) -> None:
    freed: list[int] = []
    scheduler = Scheduler(cells(), freed.append)
    scheduler._few = few
    leaves, stays = enter(scheduler, layers([False, True, False, True]), layers([False, True, False, True]))
    ran, ends = [], {}
    while tasks := scheduler.schedule(0, 0.0):
        for task in tasks:
            ran += task.nodes.tolist()
            for request in scheduler.complete(task, task.nodes == leaves + exits_at):
                ends[request] = len(ran)
    nodes = [(leaves, node) for node in range(exits_at + 1)] + [(stays, node) for node in range(4)]
    assert sorted(ran) == sorted(request + node for request, node in nodes)
    assert list(ends) == freed == [leaves, stays]


def test_layers_submitted_ahead_of_an_exit_end_with_it() -> None:
    """Layers of one cell are one subgraph: the next is submitted before it is known whether there is one."""
    freed: list[int] = []
    scheduler = Scheduler(cells(), freed.append)
    (request,) = enter(scheduler, layers([True] * 4))
    series = scheduler.schedule(0, 0.0)
    assert [task.nodes.tolist() for task in series] == [[request], [request + 1], [request + 2], [request + 3]]
    assert scheduler.complete(series[0], np.array([False])) == []
    assert scheduler.complete(series[1], np.array([True])) == [request]
    assert not scheduler.table.live[series[2].nodes].any()
    assert freed == [], "tasks with it still run"
    assert run(scheduler, series[2:], ended=False) == []
    assert freed == [request]


def test_requests_of_a_dead_worker_are_lost_and_the_others_go_on() -> None:
    freed: list[int] = []
    scheduler = Scheduler(cells(max_batch=2), freed.append, max_tasks_to_submit=3)
    requests = enter(scheduler, *[chain(3)] * 4)
    scheduler.schedule(0, 0.0)
    tasks = scheduler.schedule(1, 0.0)
    assert scheduler.worker_died(0) == requests[:2] == freed
    assert run(scheduler, tasks) == requests[2:]
    assert freed == requests


def test_an_aborted_request_is_freed_when_its_tasks_are_done() -> None:
    freed: list[int] = []
    scheduler = Scheduler(cells(), freed.append)
    one, two = enter(scheduler, chain(9), chain(9))
    tasks = scheduler.schedule(0, 0.0)
    scheduler.abort(one)
    scheduler.abort(one)
    assert freed == []
    run(scheduler, tasks)
    assert freed == [one]
    assert [task.nodes.tolist() for task in scheduler.schedule(0, 0.0)] == [[two]] * 4


def test_least_slack_goes_first_and_the_late_go_last() -> None:
    table = cells(max_batch=1)
    scheduler = Scheduler(table, order=SlackOrder(), step_s={"step": 1.0}, max_tasks_to_submit=1)
    (late,), (loose,), (tight,) = (
        enter(scheduler, chain(4), deadline_s=d) for d in (2.0, 90.0, 9.0)
    )  # fmt: skip
    order = []
    for now in range(12):
        (task,) = scheduler.schedule(0, float(now))
        order += task.nodes.tolist()
        run(scheduler, [task])
    assert order == [tight] * 4 + [loose] * 4 + [late] * 4


def test_who_has_begun_is_not_set_back_when_it_is_late() -> None:
    scheduler = Scheduler(cells(max_batch=1), order=SlackOrder(), step_s={"step": 1.0, "decoder": 1.0})
    (begun,) = enter(scheduler, translation(1, 4), deadline_s=2.0)
    run(scheduler, scheduler.schedule(0, -4.0))
    enter(scheduler, translation(1, 4), deadline_s=90.0)
    (task, *_) = scheduler.schedule(0, 50.0)
    assert task.nodes.tolist() == [begun + 1]


def lstm_costs() -> Costs:
    return Costs(cells={"step": StepCost(flat_s=1.0, knee=2, full_s=2.0, full=4)}, task_s=0.5)


def served_ends(table: CellTable, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    arrivals = [
        Arrival(at_s=float(at), graph=compiled(chain(int(n)), table), lengths={})
        for at, n in zip(np.cumsum(rng.exponential(1.0, 40)), rng.integers(1, 9, 40), strict=True)
    ]
    return serve(Scheduler(table), arrivals, lstm_costs(), workers=2).ended_s.tolist()


def test_equal_seeds_give_equal_schedules() -> None:
    assert served_ends(cells(), 1) == served_ends(cells(), 1) != served_ends(cells(), 2)


def test_max_tasks_to_submit_is_checked() -> None:
    with pytest.raises(ValueError, match="max_tasks_to_submit=0"):
        Scheduler(cells(), max_tasks_to_submit=0)


class Watched(Scheduler):
    """Notes how many series of other cells go before a cell that has ready nodes."""

    longest = waited = 0

    def schedule(self, worker: int, now: float) -> list[Task]:
        waits = self.ready(0) > 0
        tasks = super().schedule(worker, now)
        self.waited = self.waited + 1 if waits and tasks and tasks[0].cell else 0
        self.longest = max(self.longest, self.waited)
        return tasks


def translations(table: CellTable, rate_per_s: float, count: int = 120) -> list[Arrival]:
    """Poisson arrivals of translations, one in twenty of them long; the same ones at every rate."""
    rng = np.random.default_rng(3)
    times = np.cumsum(rng.exponential(1.0, count)) / rate_per_s
    lengths = np.where(np.arange(count) % 20, rng.integers(4, 16, count), 150)
    return [
        Arrival(at_s=float(at), graph=compiled(translation(int(n), 330), table), lengths={1: int(n)})
        for at, n in zip(times, lengths, strict=True)
    ]


STEPS = Costs(cells=dict.fromkeys(("step", "decoder"), StepCost(flat_s=1e-3, knee=16, full_s=4e-3, full=64)))


def test_on_one_worker_encoders_do_not_wait_for_the_longest_translation() -> None:
    """With one worker no cell runs when it asks, so that as published its decoders would go first for ever."""
    table = cells(max_batch=64)
    lone = serve(Scheduler(table), translations(table, 1e-3), STEPS).latency_ms(90)
    together = serve(Scheduler(table), translations(table, 1e9), STEPS)
    capacity_per_s = len(together.ended_s) / together.ended_s.max()
    published, alternating = Watched(table), Watched(table, alternates=lambda: True)
    arrivals = translations(table, 0.1 * capacity_per_s)
    slow, fast = (serve(one, arrivals, STEPS).latency_ms(90) for one in (published, alternating))
    assert alternating.longest <= 2 < published.longest
    assert fast <= 2 * lone < slow


def test_alternating_cells_take_turns_by_who_was_served_longest_ago() -> None:
    scheduler = Scheduler(cells(max_batch=2), max_tasks_to_submit=1, alternates=lambda: True)
    enter(scheduler, chain(9), layers([True], 9), tree(0), tree(0), tree(0))
    names = []
    for _ in range(6):
        tasks = scheduler.schedule(0, 0.0)
        names.append(shown(scheduler, tasks)[0][0])
        run(scheduler, tasks, ended=False)
    assert names == ["deep", "step", "leaf", "deep", "step", "leaf"]


def _trace(few: int, seed: int) -> list[object]:
    """Serve a mix with two workers, and return all tasks and who ended by them."""
    draw = np.random.default_rng(seed)
    scheduler = Scheduler(cells(max_batch=6), max_tasks_to_submit=2)
    scheduler._few = few
    made = [chain(int(n)) for n in draw.integers(1, 9, 5)]
    made += [translation(int(n), 7) for n in draw.integers(1, 5, 5)]
    made += [layers([True, False, False], 3), layers([True]), tree(complete_tree(4)), tree((0, (1, 2)))]
    numbers = enter(scheduler, *made)
    seen: list[object] = []
    for step in range(200):
        for worker in range(2):
            for task in scheduler.schedule(worker, 0.0):
                rows = task.in_rows.tolist(), task.out_rows.tolist()
                grows = scheduler.cells.cells[task.cell].until is not None
                ended = (task.nodes * 7 + step) % 4 == 0 if grows else None
                seen.append((task.cell, worker, task.nodes.tolist(), rows, task.last.tolist()))
                seen.append(sorted(scheduler.complete(task, ended)))
        if step == 3:
            scheduler.abort(numbers[1])
    assert not any(map(len, scheduler.queues))
    return seen


@pytest.mark.parametrize("seed", range(5))
def test_few_nodes_go_through_as_many_do(seed: int) -> None:
    expected = _trace(0, seed)
    assert len(expected) > 20
    assert _trace(2, seed) == expected
    assert _trace(99, seed) == expected
