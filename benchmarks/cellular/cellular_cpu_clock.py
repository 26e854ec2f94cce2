"""Loads on the clock of a worker's CPU time, for benchmarks of cells: nothing is run from here.

Requests arrive when the one worker of an engine has computed for so long, or at once when it has nothing to do. So
latencies are those of a machine whose core has no other work, on a machine that has. All is really executed, in the
engine's order; what accepting a request costs is left out, as the engine does that in other threads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vllm_ext.cellular.engine import CellularEngine
from vllm_ext.cellular.requests import Request
from vllm_ext.cellular.scheduler import Batching, Task

Asked = Mapping[str, Any]


class CpuClock:
    """A manner of batching whose worker lets requests in by its own CPU time, when `served` has said which."""

    def __init__(self, inner: Batching) -> None:
        self._inner = inner
        self._engine: CellularEngine | None = None
        self._coming: deque[tuple[float, Asked]] = deque()
        self._at: dict[Request, float] = {}
        self._latencies: list[float] = []
        self._over = threading.Event()
        self._shift: float | None = None
        """What the clock is ahead of the thread's CPU time; None until it starts."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def schedule(self, worker: int, now: float) -> list[Task]:
        """Let in who has arrived, and without anything to do who comes next."""
        while True:
            while self._shift is not None and self._coming and self._coming[0][0] <= time.thread_time() + self._shift:
                self._let_in()
            tasks = self._inner.schedule(worker, now)
            if tasks or not self._coming:
                return tasks
            self._shift = self._coming[0][0] - time.thread_time()

    def served(self, engine: CellularEngine, times: np.ndarray, requests: Sequence[Asked], wait_s: float) -> np.ndarray:
        """Serve requests in an idle engine of this batching; return their latencies in seconds, in the order of ends.

        Args:
            engine: One worker's.
            times: When requests arrive, in seconds of the clock; increasing.
            requests: As many.
            wait_s: When to give up, in seconds of the wall.
        """
        engine.on_finished = self._ended
        self._engine, self._coming = engine, deque(zip(times.tolist(), requests, strict=True))
        engine.submit(requests[0])  # wakes the worker; the clock starts when this one is done
        if not self._over.wait(wait_s):
            raise TimeoutError(f"{len(self._at)} requests are not served within {wait_s:.0f} s")
        return np.array(self._latencies)

    def _let_in(self) -> None:
        assert self._engine is not None
        assert self._shift is not None
        at, request = self._coming.popleft()
        begin = time.thread_time()
        self._at[self._engine.submit(request)] = at
        self._shift -= time.thread_time() - begin
        self._engine._enter()  # this thread holds the engine's lock, as it does when it enters them itself

    def _ended(self, request: Request) -> None:
        if (at := self._at.pop(request, None)) is None or self._shift is None:
            return
        self._latencies.append(time.thread_time() + self._shift - at)
        if not self._at and not self._coming:
            self._over.set()
