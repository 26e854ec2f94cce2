"""The engine: takes requests from any thread, runs workers, gives results back.

A worker asks the scheduler itself when it has nothing to do, between two series of tasks, so that no other thread has
to wake up first. Scheduler, tables and storage are changed under one lock; cells are computed outside of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ext.cellular.arena import Arena, ArenaFull
from vllm_ext.cellular.cells import Cell
from vllm_ext.cellular.executor import Compute, Executor, Outcome
from vllm_ext.cellular.graphs import CellTable, Ints
from vllm_ext.cellular.layout import Region, Result
from vllm_ext.cellular.models.base import Model, RequestError
from vllm_ext.cellular.options import EngineOptions
from vllm_ext.cellular.order import ORDERS
from vllm_ext.cellular.requests import EngineBusy, EngineError, Request, Session, SessionClosed, settle
from vllm_ext.cellular.scheduler import Batching, Scheduler, Task
from vllm_ext.cellular.templates import Templates

MAX_BATCH_ON_CPU = 128
"""Largest batch by default: the time of a row does not fall beyond it, and newcomers wait for the batch."""
NO_OBJECTIVE_S = 60.0
"""Objective by which requests without one are ordered among others."""
_WORKERS_OF_ALGORITHM_1 = 2
"""When fewer of them ask, no cell has a running task, by which Algorithm 1 lets early stages in."""
_LOOKED_PAST = 8
"""Requests without room behind which others are still looked at."""
_MOST_PASSED = 64
"""Requests that may pass one without room; then they wait until it has got it."""
_MINUTE_S = 60.0
"""In which workers begin anew so often as `EngineOptions.max_restarts` says."""
_RATE_OF = 200
"""Results from which the rate of service is taken."""
Settled = tuple[Request, dict[str, torch.Tensor], EngineError | None]
"""A request that is over, with its results or why there are none."""
logger = logging.getLogger(__name__)


class CellularEngine:
    """Serves one model.

    Args:
        model: Its cells are probed first.
        options: See there.
        batching: Makes the manner of batching from the cells and the function that is told of freed requests; cellular
            batching by default.
        compute: How cells are called.

    Raises:
        CellError: a cell cannot be batched.
    """

    def __init__(
        self, model: Model, options: EngineOptions | None = None, *,
        batching: Callable[[CellTable, Callable[[int], None]], Batching] | None = None, compute: Compute = Cell.call,
    ) -> None:  # fmt: skip
        self.model, self.options = model, options or EngineOptions()
        cells = [_resized(cell, self.options.max_batch or {}, self.options.device) for cell in model.cells]
        if unknown := {*(self.options.max_batch or {})} - {cell.name for cell in cells}:
            raise ValueError(f"max_batch={sorted(unknown)}: {model.kind} has {', '.join(cell.name for cell in cells)}")
        for module in model.modules.values():
            module.to(self.options.device)
        for cell in cells:
            cell.check()
        self.cells = CellTable(cells)
        self.arena = Arena(self.cells.kinds, self.options.device, self.options.state_bytes)
        self.batching = (batching or self._cellular)(self.cells, self._on_free)
        self.executors = [Executor(cells, self.cells, self.arena, compute) for _ in range(self.options.workers)]
        self.on_finished: Callable[[Request], None] = lambda _: None
        self.errors, self.scheduling_s = 0, 0.0
        self._ahead = self.options.device != "cpu"
        self._lock = threading.Condition()
        self._inbox: deque[Request] = deque()
        self._requests: dict[int, Request] = {}
        self._open: set[Request] = set()
        self._reading: set[object] = set()
        self._streaming, self._closing = 0, False
        self._stored: dict[int, Request] = {}
        self._templates = Templates(model, self.cells)
        self._ends: deque[float] = deque(maxlen=_RATE_OF)
        self._deaths: deque[float] = deque()
        self.restarts = 0
        self._alive = set(range(self.options.workers))
        self._threads = [
            threading.Thread(target=self._work, args=(worker,), name=f"cell-worker-{worker}", daemon=True)
            for worker in self._alive
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, request: Mapping[str, Any], *, slo_s: float | None = None, session: Session | None = None,
        on_output: Callable[[Any], None] | None = None,
    ) -> Request:  # fmt: skip
        """Accept a request.

        Args:
            request: As the model wants it.
            slo_s: Within how many seconds it should end.
            session: That it belongs to; of models that keep state.
            on_output: Called from a worker's thread with each value of the model's streamed result; it must not block.

        Raises:
            RequestError: the request is malformed, or of a model whose requests need a session without one.
            EngineBusy: there are too many.
            SessionClosed: the session is.
            EngineError: the engine is closed, or has lost all workers, or the model's graph is none.
        """
        with self.admission() as place:
            return self.accept(request, place, slo_s=slo_s, session=session, on_output=on_output)

    @contextmanager
    def admission(self) -> Iterator[object]:
        """Hold the place of an open request while it is read, which can take long.

        Raises:
            EngineBusy: there are too many.
            EngineError: the engine is closed, or has lost all workers.
        """
        place = object()
        with self._lock:
            self._refuse()
            self._reading.add(place)
        try:
            yield place
        finally:
            with self._lock:
                self._reading.discard(place)

    def accept(
        self, request: Mapping[str, Any], place: object, *, slo_s: float | None = None, session: Session | None = None,
        on_output: Callable[[Any], None] | None = None,
    ) -> Request:  # fmt: skip
        """Accept a request in the place of an `admission`; see `submit`."""
        if bool(self.model.held) != (session is not None):
            raise RequestError("session", session, "given" if self.model.held else "left out: the model keeps no state")
        parsed = self.model.parse(request)
        try:
            graph = self._templates.graph(parsed, session)
        except RequestError:
            raise
        except Exception as error:
            raise EngineError(f"{self.model.kind} has no graph for the request: {error}") from error
        made = Request(
            graph=graph, future=Future(), arrived_s=time.monotonic(), slo_s=slo_s, answer=self.model.answer,
            on_output=on_output, session=session,
        )  # fmt: skip
        with self._lock:
            self._check_health()
            if session is not None and session.closed:
                raise SessionClosed
            self._reading.discard(place)
            self._open.add(made)
            self._streaming += on_output is not None
            if session is not None and (session.running or session.waiting):
                session.waiting.append(made)
            else:
                self._enqueue(made)
        return made

    def abort(self, request: Request) -> None:
        """Drop a request; one that has ended is left alone."""
        with self._lock:
            if request not in self._open:
                return
            request.aborted = True
            self._gone(request)
            if request.number is not None:
                del self._requests[request.number]
                self.batching.abort(request.number)
        request.future.cancel()

    def open_session(self) -> Session:
        """Return a session whose state is zeros.

        Raises:
            ArenaFull: there is no room for it.
        """
        counts: dict[int, int] = {}
        places = {}
        for name, port in self.model.held.items():
            kind = self.cells.kind_number[port.kind]
            places[name] = (kind, counts.get(kind, 0))
            counts[kind] = counts.get(kind, 0) + 1
        regions = [Region(kind, rows) for kind, rows in counts.items()]
        with self._lock:
            bases = self.arena.take(regions)
            rows = {name: int(bases[kind]) + place for name, (kind, place) in places.items()}
            for name, row in rows.items():
                self.arena.clear(places[name][0], row)
        return Session(self.submit, self.close_session, regions, bases, rows)

    def close_session(self, session: Session) -> None:
        """See `Session.close`."""
        with self._lock:
            if session.closed:
                return
            session.closed = True
            waiting, running = list(session.waiting), session.running
            if running is None:
                self.arena.give(session.regions, session.bases)
        for request in (*waiting, *([running] if running else ())):
            self.abort(request)

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop the workers and fail what is open; a second call does nothing."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)
        self._fail_all(EngineError("the engine was closed"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def open_requests(self) -> int:
        """Requests that have been accepted and not ended."""
        return len(self._open)

    @property
    def dead_workers(self) -> int:
        """Workers that have died and did not begin anew."""
        return self.options.workers - len(self._alive)

    @property
    def healthy(self) -> bool:
        """Whether a worker is left and requests are accepted."""
        return bool(self._alive) and not self._closing

    def _cellular(self, cells: CellTable, on_free: Callable[[int], None]) -> Batching:
        options = self.options
        return Scheduler(
            cells, on_free, max_tasks_to_submit=options.max_tasks_to_submit, order=ORDERS[options.order](),
            step_s=options.step_s, alternates=self._alternates,
        )  # fmt: skip

    def _alternates(self) -> bool:
        if self.options.cells is None:
            return len(self._alive) < _WORKERS_OF_ALGORITHM_1
        return self.options.cells == "alternate"

    def _check_health(self) -> None:
        if not self.healthy:
            raise EngineError("the engine is closed" if self._closing else "all workers have died; restart the engine")

    def _refuse(self) -> None:
        self._check_health()
        count = len(self._open) + len(self._reading)
        if count >= self.options.max_requests:
            ends = self._ends
            rate = (len(ends) - 1) / max(ends[-1] - ends[0], 1e-9) if len(ends) > 1 else 1.0
            raise EngineBusy(count, min(max(count / (2 * rate), 1.0), 60.0))

    def _enqueue(self, request: Request) -> None:
        if request.session is not None:
            request.session.running = request
        self._inbox.append(request)
        self._lock.notify()

    def _work(self, worker: int) -> None:
        """Serve until the engine closes; a worker that dies begins anew, as all that matters is in the arena."""
        while True:
            try:
                self._serve(worker)
                return
            except BaseException as error:  # noqa: BLE001 - a thread that ends must not leave requests behind
                if not self._died(worker, error):
                    return

    def _serve(self, worker: int) -> None:
        executor = self.executors[worker]
        executor.begin_series()
        while True:
            with self._lock:
                tasks = self._next(worker)
            if tasks is None:
                return
            if not tasks[0].goes_on:
                executor.begin_series()
            ahead = self._may_run_ahead(tasks)
            for task, computed, outcome in executor.run(tasks, self.batching.table.are_live, ahead=ahead):
                self._complete(task, computed, outcome)

    def _may_run_ahead(self, tasks: list[Task]) -> bool:
        """Whether a series is computed before its first result is read, as what only ends chains allows."""
        exits = self.batching.table.exits
        return self._ahead and len(tasks) > 1 and not any(exits[task.nodes].any() for task in tasks)

    def _next(self, worker: int) -> list[Task] | None:
        """Wait for tasks; None when the engine closes or has died."""
        while not self._closing and worker in self._alive:
            begin = time.thread_time()
            if self._inbox:
                self._enter()
            tasks = self.batching.schedule(worker, time.monotonic())
            self.scheduling_s += time.thread_time() - begin
            if tasks:
                if self._inbox or len(self._alive) > 1:
                    self._lock.notify()
                return tasks
            self._lock.wait()
        return None

    def _enter(self) -> None:
        """Pass new requests to the scheduler, as many as there is room for."""
        entered: list[Request] = []
        waiting: list[Request] = []
        while self._inbox and len(waiting) < _LOOKED_PAST and all(one.passed < _MOST_PASSED for one in waiting):
            request = self._inbox.popleft()
            if request.aborted:
                self._end_turn(request)
                continue
            try:
                request.bases = self.arena.take(request.graph.regions)
            except Exception as error:  # noqa: BLE001 - full, or what a device says that has no memory left
                full = isinstance(error, ArenaFull)
                if full and (self._stored or entered) and self.arena.fits(request.graph.regions):
                    waiting.append(request)
                    continue
                self._fail(request, EngineError(f"the request needs more room than there is: {error}"))
                self._end_turn(request)
                continue
            entered.append(request)
            for one in waiting:
                one.passed += 1
        self._inbox.extendleft(reversed(waiting))
        if entered:
            self._begin(entered)

    def _begin(self, entered: list[Request]) -> None:
        """Schedule requests that have rows, those whose data cannot be stored excepted."""
        entered = self._written(entered)
        if not entered:
            return
        graphs = [request.graph for request in entered]
        deadlines = [r.arrived_s + (r.slo_s if r.slo_s is not None else NO_OBJECTIVE_S) for r in entered]
        try:
            numbers = self.batching.add(graphs, np.array([request.bases for request in entered]), deadlines)
        except BaseException as error:
            for request in entered:
                self.arena.give(request.graph.regions, request.bases)  # type: ignore[arg-type]
                self._fail(request, EngineError(f"the request cannot begin: {error!r}"))
                self._end_turn(request)
            raise
        for request, number in zip(entered, numbers, strict=True):
            request.number = number
            self._requests[number] = request
            self._stored[number] = request

    def _written(self, requests: list[Request]) -> list[Request]:
        """Store what requests brought and return them; if that fails, one by one, to find out whose fault it is."""
        try:
            for request in requests:
                if request.session is not None:
                    request.session.save(self.arena)
            self.arena.write([request.graph for request in requests], np.array([one.bases for one in requests]))
        except Exception as error:  # noqa: BLE001 - whatever the data of a user's model leads to
            if len(requests) > 1:
                return [one for request in requests for one in self._written([request])]
            self.arena.give(requests[0].graph.regions, requests[0].bases)  # type: ignore[arg-type]
            self._fail(requests[0], EngineError(f"the request's data cannot be stored: {error}"))
            self._end_turn(requests[0])
            return []
        return requests

    def _complete(self, task: Task, live: NDArray[np.bool_], outcome: Outcome) -> None:
        settled: list[Settled] = []
        try:
            with self._lock:
                begin = time.thread_time()
                try:
                    self._take_note(task, live, outcome, settled)
                except BaseException as raised:
                    settled += self._dropped(task, raised)
                    raise
                self.scheduling_s += time.thread_time() - begin
        finally:  # nobody else knows of them any more
            for request, values, error in settled:
                self._finished(request)
                settle(request, values=values, error=error)

    def _take_note(self, task: Task, live: NDArray[np.bool_], outcome: Outcome, settled: list[Settled]) -> None:
        """Bring the tables up to date, and collect who has ended or failed."""
        now = time.monotonic()
        table = self.batching.table
        settled += self._failed(task, outcome)
        if self._streaming and self.model.streamed is not None and outcome.outputs:
            self._stream(task.nodes[live], outcome, self.model.streamed)
        over = self.batching.complete(task, outcome.ended, outcome.failed)
        fresh = task.nodes[table.steps[task.nodes] == 1]
        for number in table.request[fresh].tolist():
            if (request := self._requests.get(number)) is not None and request.started_s is None:
                request.started_s = now
        ended = [self._requests.pop(number) for number in over if number in self._requests]
        for request, (values, said) in zip(ended, self._results_of(ended), strict=True):
            if said is not None:
                self.errors += 1
                self._undo(request)  # before the session's next one begins
            request.ended_s = now
            self._gone(request)
            settled.append((request, values, said))
        self._ends.extend([now] * len(ended))
        if len(self._alive) > 1:
            self._lock.notify_all()

    def _dropped(self, task: Task, error: BaseException) -> list[Settled]:
        """Give up the requests of a task that cannot be completed."""
        found: list[Settled] = []
        for number in np.unique(self.batching.table.request[task.nodes]).tolist():
            if (request := self._requests.pop(number, None)) is not None:
                self.batching.abort(number)
                self.errors += 1
                self._undo(request)
                self._gone(request)
                found.append((request, {}, EngineError(f"worker {task.worker} died with {error!r}")))
        return found

    def _finished(self, request: Request) -> None:
        """Tell who watches of a request that has ended; what it does wrong hurts nobody."""
        if request.ended_s is None:
            return
        try:
            self.on_finished(request)
        except Exception:
            logger.exception("on_finished raised")

    def _failed(self, task: Task, outcome: Outcome) -> list[Settled]:
        if outcome.failed is None or not outcome.failed.any():
            return []
        name = self.cells.cells[task.cell].name
        found: list[Settled] = []
        for number, error in zip(
            self.batching.table.request[task.nodes[outcome.failed]].tolist(), outcome.errors, strict=True
        ):
            request = self._requests.pop(number, None)
            if request is not None:
                self.errors += 1
                self._gone(request)
                found.append((request, {}, EngineError(f"cell {name} raised: {error!r}")))
        return found

    def _stream(self, computed: Ints, outcome: Outcome, streamed: str) -> None:
        """Hand out new values of collected outputs to who wants them at once."""
        table = self.batching.table
        numbers, live = table.request[computed].tolist(), table.live[computed].tolist()
        values: dict[int, list[Any]] = {}
        for place, (node, number) in enumerate(zip(computed.tolist(), numbers, strict=True)):
            request = self._requests.get(number)
            if not live[place] or request is None or request.on_output is None:
                continue
            for result in request.graph.results.get(streamed, ()):
                if result.node == node - number:
                    if result.place not in values:  # one copy for all from a device
                        values[result.place] = outcome.outputs[result.place].tolist()
                    if self.model.is_told(value := values[result.place][place]):
                        request.tell(value)

    def _results_of(self, ended: list[Request]) -> list[tuple[dict[str, torch.Tensor], EngineError | None]]:
        """Return the results of requests; if that fails, one by one, to find out whose fault it is."""
        try:
            return [(values, None) for values in self._results(ended)]
        except Exception as error:  # noqa: BLE001 - such as no memory for them
            if len(ended) == 1:
                if isinstance(error, EngineError):
                    return [({}, error)]
                return [({}, EngineError(f"the results cannot be read: {error!r}"))]
            return [found for request in ended for found in self._results_of([request])]

    def _results(self, ended: list[Request]) -> list[dict[str, torch.Tensor]]:
        """Copy results out of storage before their rows are used again."""
        found: list[dict[str, torch.Tensor]] = [{} for _ in ended]
        last: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for place, request in enumerate(ended):
            for name, outputs in request.graph.results.items():
                node, _, kind, first, collected = self._computed(request, name, outputs)
                row = -1 - first if first < 0 else int(request.bases[kind]) + first - 1  # type: ignore[index]
                if collected:
                    count = int(self.batching.table.steps[request.number + node])  # type: ignore[operator]
                    found[place][name] = self.arena.gather(kind, np.arange(row, row + count)).cpu()
                else:
                    last.setdefault((name, kind), []).append((place, row))
        for (name, kind), pairs in last.items():
            values = self.arena.gather(kind, np.array([row for _, row in pairs])).cpu()
            for (place, _), value in zip(pairs, values, strict=True):
                found[place][name] = value
        return found

    def _computed(self, request: Request, name: str, outputs: tuple[Result, ...]) -> Result:
        """Return the last of a request's outputs that was computed."""
        steps, number = self.batching.table.steps, request.number or 0
        for one in reversed(outputs):
            if steps[number + one.node]:
                return one
        raise EngineError(f"result {name!r}: the request left before any node that has it")

    def _gone(self, request: Request) -> None:
        """Count a request that is no longer open."""
        self._open.discard(request)
        self._streaming -= request.on_output is not None
        if request.session is not None and request in request.session.waiting:
            request.session.waiting.remove(request)

    def _end_turn(self, request: Request) -> None:
        """Let the next request of a session go on."""
        session = request.session
        if session is None:
            return
        session.running = None
        if session.waiting:
            self._enqueue(session.waiting.popleft())
        elif session.closed:
            self.arena.give(session.regions, session.bases)

    def _undo(self, request: Request) -> None:
        """Give a session the state back that it had before a request which failed."""
        if request.session is not None:
            request.session.restore(self.arena)

    def _on_free(self, number: int) -> None:
        """Nothing of a request runs any more."""
        request = self._stored.pop(number)
        if number not in self._requests and request.ended_s is None:  # it was aborted or has failed
            self._undo(request)
        if request.bases is not None:
            self.arena.give(request.graph.regions, request.bases)
        self._end_turn(request)

    def _fail(self, request: Request, error: EngineError) -> None:
        self.errors += 1
        self._gone(request)
        settle(request, error=error)

    def _died(self, worker: int, error: BaseException) -> bool:
        """Fail the requests that a worker had; return whether it begins anew."""
        logger.error("worker %d died", worker, exc_info=error)
        with self._lock:
            try:
                lost = self.batching.worker_died(worker)
            except Exception:
                logger.exception("what worker %d had is unknown, the engine ends", worker)
                lost = []
                self._alive.clear()
            again = worker in self._alive and self._may_restart(time.monotonic())
            if not again:
                self._alive.discard(worker)
            for number in lost:
                if (request := self._requests.pop(number, None)) is not None:
                    self._undo(request)
                    self._fail(request, EngineError(f"worker {worker} died with {error!r}"))
            self._lock.notify_all()
        if not self._alive:
            self._fail_all(EngineError(f"all workers have died, the last with {error!r}"))
        return again

    def _may_restart(self, now: float) -> bool:
        """Whether fewer deaths than allowed are within the last minute; counts one more."""
        while self._deaths and now - self._deaths[0] > _MINUTE_S:
            self._deaths.popleft()
        if len(self._deaths) >= self.options.max_restarts:
            return False
        self._deaths.append(now)
        self.restarts += 1
        return True

    def _fail_all(self, error: EngineError) -> None:
        with self._lock:
            for request in list(self._open):
                self._fail(request, error)
            self._requests.clear()
            self._inbox.clear()


def _resized(cell: Cell, sizes: Mapping[str, int], device: str) -> Cell:
    """Return a cell with the batches it is served with: powers of two, as each is a CUDA graph."""
    most = sizes.get(cell.name, cell.max_batch)
    if cell.name not in sizes and device == "cpu":
        most = max(min(most, MAX_BATCH_ON_CPU), cell.min_batch)
    return replace(cell, batch_sizes=cell.with_batches(most, cell.min_batch).batch_sizes)
