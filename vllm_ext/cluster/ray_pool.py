"""Points of a sweep on the machines of a Ray cluster."""

from __future__ import annotations

import logging
import os
import signal
import threading
from concurrent.futures import Future
from typing import Any, Self

from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep.pools import Evaluate, Pool, run_point
from vllm_ext.simulation.sweep.store import Outcome, versions

LOCAL = "local"
"""Address that stands for a cluster of this machine alone, which lives as long as the pool."""


class RayPool(Pool):
    """Runs a point per core of a Ray cluster.

    All machines need the same versions of vllm-ext and vLLM, which is checked, and the files that the points name,
    under the same paths, which is not. A worker that dies takes its own point along and no other.
    """

    def __init__(self, evaluate: Evaluate, *, address: str = LOCAL, jobs: int | None = None) -> None:
        """Prepare.

        Args:
            evaluate: What to run; importable on all machines.
            address: Of a running cluster (``auto``: the one this machine belongs to), or `LOCAL`.
            jobs: Most points at a time; None: as many as the cluster has cores.

        Raises:
            ValueError: ``jobs`` is below 1.
        """
        if jobs is not None and jobs < 1:
            raise ValueError(f"jobs={jobs!r}: must be at least 1")
        self._evaluate = evaluate
        self._address = address
        self._jobs = jobs
        self.places = 0
        self._started = False
        self._sigterm: Any = None
        self._run: Any = None

    def __enter__(self) -> Self:
        """Start or join the cluster.

        Raises:
            ImportError: Ray is missing; the message says how to get it.
            ConnectionError: there is no cluster at the address.
        """
        try:
            import ray
        except ImportError as error:
            raise ImportError("--ray needs Ray: pip install 'vllm-ext[ray]'") from error
        if not ray.is_initialized():
            local = self._address == LOCAL
            options: dict[str, Any] = {"include_dashboard": False, "num_cpus": self._jobs} if local else {}
            self._sigterm = signal.getsignal(signal.SIGTERM)
            if local:
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody asked for it to call home
            ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR, **options)
            self._started = True
        self._run = ray.remote(num_cpus=1, max_retries=0)(_run_if_same_versions)
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        cores = max(1, int(resources.get("CPU", 1)))
        self.places = min(cores, self._jobs or cores)
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the cluster, or end it if it is our own; points under way are given up."""
        import ray

        self._run = None
        if self._started:
            ray.shutdown()
            self._started = False
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, self._sigterm)  # Ray leaves a handler of its own

    def submit(self, spec: SimulationSpec) -> Future[Outcome]:
        """Run a point on the cluster. The future never holds an exception: a run or worker that died has failed."""
        result: Future[Outcome] = Future()

        def settle(done: Future[Outcome]) -> None:
            error = done.exception()
            if error is None:
                result.set_result(done.result())
            else:
                # Of a traceback from a worker, which is all in the message, the last line says what happened.
                last = (str(error).strip().splitlines() or [""])[-1]
                result.set_result(Outcome(error=f"{type(error).__name__}: {last}"))

        self._run.remote(self._evaluate, spec, versions()).future().add_done_callback(settle)
        return result


def _run_if_same_versions(evaluate: Evaluate, spec: SimulationSpec, expected: dict[str, str]) -> Outcome:
    if (found := versions()) != expected:
        return Outcome(
            error=f"WrongVersions: this worker has {found}, the sweep {expected}; install the same everywhere"
        )
    return run_point(evaluate, spec)
