"""Where points are run: in this process, or in others. A pool on a Ray cluster is in `vllm_ext.cluster.ray_pool`.

`Pool.submit` is called for as many points at a time as there are places.
"""

from __future__ import annotations

import abc
import contextlib
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep.sources import loaded_modules
from vllm_ext.simulation.sweep.store import Outcome

Evaluate = Callable[[SimulationSpec], Mapping[str, float]]
"""Runs a point and returns its metrics. Importable by name, as it is sent to other processes."""


def simulate_point(spec: SimulationSpec) -> dict[str, float]:
    """Simulate a point and reduce it to metrics; whatever `simulate` raises comes through.

    vLLM is imported here: this is called in workers, or where there is but one process.
    """
    from vllm_ext.simulation.measure.iterations import iterations
    from vllm_ext.simulation.measure.metrics import summarise, windows_of
    from vllm_ext.simulation.run import simulate

    if spec.replicas == 1:
        run = simulate(spec)
    else:  # routers are imported by runs alone that they can decide: a change of theirs leaves all others as they are
        from vllm_ext.simulation.cluster import simulate_replicas

        run = simulate_replicas(spec)
    metrics = summarise(run) | windows_of(run, spec.record.windows)
    if spec.record.token_times:
        metrics |= iterations(run, spec.max_time_s)
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def run_point(evaluate: Evaluate, spec: SimulationSpec) -> Outcome:
    """Run a point; what it raises becomes a failed outcome. Ctrl-C comes through."""
    try:
        return Outcome(metrics=dict(evaluate(spec)), modules=loaded_modules())
    except Exception as error:  # noqa: BLE001 - recorded with its type and shown; the other points go on
        return Outcome(error=f"{type(error).__name__}: {error}")


class Pool(contextlib.AbstractContextManager["Pool"]):
    """Runs points, within its context."""

    places: int
    """How many points may be under way at a time; valid within the context."""

    def __exit__(self, *error: object) -> None:
        """End what was started; after an error (Ctrl-C, say) without waiting for points under way."""

    @abc.abstractmethod
    def submit(self, spec: SimulationSpec) -> Future[Outcome]:
        """Run a point. The future never holds an exception: a run that raised, or whose worker died, has failed."""


class InProcessPool(Pool):
    """Runs one point after the other in this process; `submit` returns when it is done."""

    places = 1

    def __init__(self, evaluate: Evaluate) -> None:
        self._evaluate = evaluate

    def submit(self, spec: SimulationSpec) -> Future[Outcome]:
        """Run a point, and return a future that is done."""
        future: Future[Outcome] = Future()
        future.set_result(run_point(self._evaluate, spec))
        return future


class ProcessPool(Pool):
    """Runs points in processes of their own, which are kept.

    They are forks of a server that has imported vLLM once, if they simulate, and runs nothing itself. Every worker is
    an executor of one process: when it dies, killed for lack of memory say, it takes its own point along and no other.
    A thread of this process waits for each point under way.
    """

    def __init__(self, evaluate: Evaluate, jobs: int) -> None:
        """Prepare.

        Raises:
            ValueError: ``jobs`` is below 1.
        """
        if jobs < 1:
            raise ValueError(f"jobs={jobs!r}: must be at least 1")
        self.places = jobs
        self._evaluate = evaluate
        self._threads = ThreadPoolExecutor(jobs)
        self._workers: dict[int, ProcessPoolExecutor] = {}
        """By the id of the process."""
        self._free: list[int] = []

    def __exit__(self, *error: object) -> None:
        for pid in self._workers.keys() - set(self._free):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers.values():
            worker.shutdown()

    def submit(self, spec: SimulationSpec) -> Future[Outcome]:
        """Run a point in a process that is free, or in a new one."""
        return self._threads.submit(self._run, self._free.pop() if self._free else self._start(), spec)

    def _run(self, pid: int, spec: SimulationSpec) -> Outcome:
        try:
            outcome = self._workers[pid].submit(run_point, self._evaluate, spec).result()
        except BrokenProcessPool:
            del self._workers[pid]
            return Outcome(error="WorkerDied: its process ended abruptly; was memory short?")
        except Exception as error:  # noqa: BLE001 - the description, or what came back, can't be sent: shown as the outcome
            outcome = Outcome(error=f"{type(error).__name__}: {error}")
        self._free.append(pid)
        return outcome

    def _start(self) -> int:
        context = multiprocessing.get_context("forkserver")
        # Any other function may need anything, or nothing.
        preloaded = ["vllm_ext.simulation.sweep.preload"] if self._evaluate.__module__ == __name__ else []
        context.set_forkserver_preload(preloaded)
        worker = ProcessPoolExecutor(1, mp_context=context, initializer=_prepare_worker)
        pid = worker.submit(os.getpid).result()
        self._workers[pid] = worker
        return pid


def local_pool(jobs: int) -> Pool:
    """Return a pool of this machine that simulates.

    Raises:
        ValueError: ``jobs`` is below 1.
    """
    return InProcessPool(simulate_point) if jobs == 1 else ProcessPool(simulate_point, jobs)


def _prepare_worker() -> None:
    """Leave Ctrl-C to the parent, and end when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def end_with_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
