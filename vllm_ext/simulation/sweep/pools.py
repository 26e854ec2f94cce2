"""Where points are run: in this process, or in others. A pool on a Ray cluster is in `vllm_ext.cluster.ray_pool`.

All have one interface: a context manager with a number of places, and `submit`, which is called for as many points at a
time as there are places.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep import evaluate as evaluation
from vllm_ext.simulation.sweep.evaluate import Evaluate
from vllm_ext.simulation.sweep.store import Outcome

_PRELOADED = "vllm_ext.simulation.sweep.preload"


class Pool(Protocol):
    """Runs points."""

    @property
    def places(self) -> int:
        """How many points may be under way at a time; valid within the context."""
        ...

    def __enter__(self) -> Self:
        """Start what is needed."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what was started; after an error (Ctrl-C, say) without waiting for points under way."""
        ...

    def submit(self, spec: SimulationSpec) -> Future[Outcome]:
        """Run a point. The future never holds an exception: a run that raised, or whose worker died, has failed."""
        ...


def run_point(evaluate: Evaluate, spec: SimulationSpec) -> Outcome:
    """Run a point; what it raises becomes a failed outcome. Ctrl-C comes through."""
    try:
        return Outcome(metrics=dict(evaluate(spec)))
    except Exception as error:  # noqa: BLE001 - recorded with its type and shown; the other points go on
        return Outcome(error=f"{type(error).__name__}: {error}")


class InProcessPool:
    """Runs one point after the other in this process; `submit` returns when it is done."""

    places = 1

    def __init__(self, evaluate: Evaluate) -> None:
        self._evaluate = evaluate

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def submit(self, spec: SimulationSpec) -> Future[Outcome]:
        """Run a point, and return a future that is done."""
        future: Future[Outcome] = Future()
        future.set_result(run_point(self._evaluate, spec))
        return future


@dataclass
class _Worker:
    """A process, and whether it has a point."""

    executor: ProcessPoolExecutor
    pid: int
    busy: bool = False


class ProcessPool:
    """Runs points in processes of their own, which are kept.

    They are forks of a server that has imported vLLM once, if they simulate, and runs nothing itself. Every worker is
    an executor of one process: when it dies, killed for lack of memory say, it takes its own point along and no other,
    and is replaced.
    """

    def __init__(self, evaluate: Evaluate, jobs: int) -> None:
        """Prepare.

        Raises:
            ValueError: ``jobs`` is below 1.
        """
        if jobs < 1:
            raise ValueError(f"jobs={jobs!r}: must be at least 1")
        self._evaluate = evaluate
        self._jobs = jobs
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()  # futures call back from the executors' threads

    @property
    def places(self) -> int:
        """How many points may be under way at a time: ``jobs``."""
        return self._jobs

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in list(self._workers):
            if worker.busy:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
            worker.executor.shutdown(wait=True, cancel_futures=True)
        self._workers.clear()

    def submit(self, spec: SimulationSpec) -> Future[Outcome]:
        """Run a point in a process that is free, or in a new one; a worker that dies costs its point only."""
        worker = self._free_worker()
        result: Future[Outcome] = Future()

        def settle(done: Future[Outcome]) -> None:
            error = done.exception()
            with self._lock:
                worker.busy = False
                if error is not None:
                    self._workers.remove(worker)
            if error is None:
                result.set_result(done.result())
            elif isinstance(error, BrokenProcessPool):
                result.set_result(Outcome(error="WorkerDied: its process ended abruptly; was memory short?"))
            else:  # the description, or what came back, cannot be sent between processes
                result.set_result(Outcome(error=f"{type(error).__name__}: {error}"))

        worker.executor.submit(run_point, self._evaluate, spec).add_done_callback(settle)
        return result

    def _free_worker(self) -> _Worker:
        with self._lock:
            worker = next((worker for worker in self._workers if not worker.busy), None)
            if worker is not None:
                worker.busy = True
                return worker
        context = multiprocessing.get_context("forkserver")
        # Any other function may need anything, or nothing.
        context.set_forkserver_preload([_PRELOADED] if self._evaluate.__module__ == evaluation.__name__ else [])
        executor = ProcessPoolExecutor(1, mp_context=context, initializer=_prepare_worker)
        worker = _Worker(executor=executor, pid=executor.submit(os.getpid).result(), busy=True)
        with self._lock:
            self._workers.append(worker)
        return worker


def local_pool(jobs: int) -> Pool:
    """Return a pool of this machine that simulates.

    Raises:
        ValueError: ``jobs`` is below 1.
    """
    simulate = evaluation.simulate_point
    return InProcessPool(simulate) if jobs == 1 else ProcessPool(simulate, jobs)


def _prepare_worker() -> None:
    """Leave Ctrl-C to the parent, and end when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def end_with_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
