"""`vllm-ext cellular demo`: who is computed when, with cellular and with padded batching, on the paper's requests.

Source: BatchMaker, figure 2.5. A step takes one unit of time, whatever the batch.
"""

from __future__ import annotations

import numpy as np

from vllm_ext.cellular.cells import CellType, Port
from vllm_ext.cellular.graphs import CellGraph, CellTable, Data, Zero
from vllm_ext.cellular.layout import CompiledGraph, compile_graph
from vllm_ext.cellular.scheduler import Batching, Scheduler, Task
from vllm_ext.experiments.batching.padding import PaddedBatching
from vllm_ext.experiments.batching.virtual import Arrival, Costs, serve

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
    manners: dict[str, Batching] = {
        "cellular batching: requests join and leave at every step": Scheduler(cells, max_tasks_to_submit=1),
        "padded batching: a batch goes on until its longest request has ended": PaddedBatching(
            cells, max_batch=max_batch, width=_LONGEST
        ),
    }
    return "\n\n".join(_table(title, batching, cells) for title, batching in manners.items())


def _table(title: str, batching: Batching, cells: CellTable) -> str:
    """Serve the requests, which are all entered before the first has ended: each has a number of its own."""
    ran = _note_steps(batching)
    halves = [0.0 if place < len(LENGTHS) // 2 else SECOND_HALF_AT for place in range(len(LENGTHS))]
    arrivals = [
        Arrival(at_s=at_s, graph=_chain(length, cells), lengths={})
        for at_s, length in zip(halves, LENGTHS, strict=True)
    ]
    served = serve(batching, arrivals, Costs(cells={"step": lambda _: 1.0}))
    last = int(served.ended_s.max())
    lines = [title, "request  length  " + "".join(f"{second:>3}" for second in range(last)) + "   ended"]
    for place, (number, length) in enumerate(zip(sorted(ran), LENGTHS, strict=True)):
        begin, end = served.started_s[place], served.ended_s[place]
        marks = ("  #" if s in ran[number] else "  ." if begin <= s < end else "   " for s in range(last))
        lines.append(f"req{place + 1:<6}{length:>6}  {''.join(marks)}{end:>8.0f}")
    lines.append(f"mean latency {served.latency_s.mean():.1f} steps, all done after {last}")
    return "\n".join(lines)


def _chain(length: int, cells: CellTable) -> CompiledGraph:
    graph = CellGraph(data={"tokens": np.zeros(length, np.int64)})
    graph.add("step", {"token": Data("tokens", each=True), "h": Zero()}, times=length, feedback={"h": "h"})
    return compile_graph(graph, cells)


def _note_steps(batching: Batching) -> dict[int, set[int]]:
    """Return number of a request -> steps in which it is computed, which is filled while ``batching`` serves."""
    ran: dict[int, set[int]] = {}
    schedule = batching.schedule

    def noted(worker: int, now: float) -> list[Task]:
        tasks = schedule(worker, now)
        for later, task in enumerate(tasks):
            for number in batching.table.request[task.nodes].tolist():
                ran.setdefault(number, set()).add(int(now) + later)
        return tasks

    batching.schedule = noted  # type: ignore[method-assign]
    return ran
