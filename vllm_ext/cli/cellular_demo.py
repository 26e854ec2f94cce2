"""`vllm-ext cellular demo`: who is computed when, with cellular and with padded batching, on the paper's requests.

Source: BatchMaker, figure 2.5. A step takes one unit of time, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vllm_ext.cellular.cells import CellType, Port
from vllm_ext.cellular.graphs import CellGraph, CellTable, Data, Zero
from vllm_ext.cellular.layout import CompiledGraph, compile_graph
from vllm_ext.cellular.scheduler import Batching, Scheduler, Task
from vllm_ext.experiments.batching.padding import PaddedBatching
from vllm_ext.experiments.batching.virtual import Arrival, Costs, Served, serve

LENGTHS = (2, 3, 3, 5, 5, 7, 3, 1)
SECOND_HALF_AT = 0.5
_LONGEST = 10


def shown(max_batch: int = 4) -> str:
    """Return both tables: a line per request, a column per step; ``#`` is a step, ``.`` padding or waiting for it.

    Raises:
        ValueError: ``max_batch`` is below 1.
    """
    step = CellType(name="step", inputs=(Port("token", (), "int64"), Port("h")), outputs=(Port("h"),))
    cells = CellTable([step.with_batches(max_batch)])
    manners: dict[str, Callable[[], Batching]] = {
        "cellular batching: requests join and leave at every step": lambda: Scheduler(cells, max_tasks_to_submit=1),
        "padded batching: a batch goes on until its longest request has ended": lambda: PaddedBatching(
            cells, max_batch=max_batch, width=_LONGEST
        ),
    }
    return "\n\n".join(_table(title, make(), cells) for title, make in manners.items())


def _table(title: str, batching: Batching, cells: CellTable) -> str:
    watched = _Watched(batching)
    arrivals = [
        Arrival(at_s=0.0 if place < len(LENGTHS) // 2 else SECOND_HALF_AT, graph=_chain(length, cells), lengths={})
        for place, length in enumerate(LENGTHS)
    ]
    served: Served = serve(watched, arrivals, Costs(cells={"step": lambda _: 1.0}))
    last = int(served.ended_s.max())
    lines = [title, "request  length  " + "".join(f"{second:>3}" for second in range(last)) + "   ended"]
    for place, length in enumerate(LENGTHS):
        begin, end = served.started_s[place], served.ended_s[place]
        ran = watched.ran[place]
        cells_of = "".join("  #" if s in ran else "  ." if begin <= s < end else "   " for s in range(last))
        lines.append(f"req{place + 1:<6}{length:>6}  {cells_of}{end:>8.0f}")
    lines.append(f"mean latency {served.latency_s.mean():.1f} steps, all done after {last}")
    return "\n".join(lines)


def _chain(length: int, cells: CellTable) -> CompiledGraph:
    graph = CellGraph(data={"tokens": np.zeros(length, np.int64)})
    graph.add("step", {"token": Data("tokens", each=True), "h": Zero()}, times=length, feedback={"h": "h"})
    return compile_graph(graph, cells)


class _Watched:
    """Notes when each request is computed: requests are entered in their order."""

    def __init__(self, inner: Batching) -> None:
        self._inner, self.table, self.counts = inner, inner.table, inner.counts
        self.add, self.abort, self.worker_died = self._add, inner.abort, inner.worker_died
        self.ran: list[set[int]] = []
        self._places: dict[int, int] = {}

    def _add(self, *args: object) -> list[int]:
        numbers = self._inner.add(*args)  # type: ignore[arg-type]
        for number in numbers:
            self._places[number] = len(self.ran)
            self.ran.append(set())
        return numbers

    def schedule(self, worker: int, now: float) -> list[Task]:
        """Note who is in the next tasks."""
        tasks = self._inner.schedule(worker, now)
        for later, task in enumerate(tasks):
            for request in self.table.request[task.nodes].tolist():
                self.ran[self._places[request]].add(int(now) + later)
        return tasks

    def complete(self, task: Task, *results: np.ndarray | None) -> list[int]:
        """Pass it on."""
        return self._inner.complete(task, *results)
