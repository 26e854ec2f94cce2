"""What a simulated request leaves behind in memory; part of `simulator_speed.py`."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from vllm_ext.simulation import run as runs
from vllm_ext.simulation.requests import SimRequest
from vllm_ext.simulation.spec import EngineSpec, SimulationSpec
from vllm_ext.simulation.step_shape import StepShape

_CLIENTS = 32


class _StepOf20Ms:
    """A cost model that costs nothing itself."""

    def device_s(self, shape: StepShape) -> float:
        return 0.02

    def host_s(self, shape: StepShape) -> float:
        return 0.0


class _ShortRequests:
    """A closed loop of many short requests, which looks at the process' memory on the way."""

    name, rows, sha256 = "short requests", 0, ""

    def __init__(self, total: int, size_bytes: Callable[[], int]) -> None:
        self.expected_requests = total
        self.sizes: list[tuple[int, int]] = []
        """(requests sent, bytes)"""
        self._size_bytes = size_bytes
        self._sent = 0

    def start(self) -> Iterator[SimRequest]:
        return (self._next(0.0) for _ in range(_CLIENTS))

    def after(self, request: SimRequest, finished_s: float, output_ids: Sequence[int]) -> Iterable[SimRequest]:
        if self._sent >= self.expected_requests:
            return ()
        if self._sent in (self.expected_requests // 5, self.expected_requests - _CLIENTS):
            gc.collect()
            self.sizes.append((self._sent, self._size_bytes()))
        return (self._next(finished_s),)

    def _next(self, arrival_s: float) -> SimRequest:
        self._sent += 1
        number = self._sent
        return SimRequest(
            req_id=f"request-{number}",
            arrival_s=arrival_s,
            prompt_tokens=16 + number % 64,
            output_tokens=1 + number % 3,
            max_tokens=64,
        )


def _resident_bytes() -> int:
    """Memory of this process, in bytes.

    Raises:
        OSError: the system is not Linux.
    """
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _allocated_bytes() -> int:
    """Bytes of Python objects, as `tracemalloc` counts them."""
    return tracemalloc.get_traced_memory()[0]


def _bytes_per_request(system: str, total: int, size_bytes: Callable[[], int]) -> float:
    """What one more request leaves in memory at the end of a long run."""
    workload = _ShortRequests(total, size_bytes)
    spec = SimulationSpec(engine=EngineSpec(system=system))
    runs.simulate_parts(spec, workload=workload, cost=_StepOf20Ms(), num_blocks=2000)
    (few, small), (many, large) = workload.sizes
    return round((large - small) / (many - few), 1)


def memory(systems: Sequence[str], total: int) -> dict[str, dict[str, float]]:
    """Bytes per request by system: resident, and allocated in a run of a fifth of the length."""
    found: dict[str, dict[str, float]] = {system: {} for system in systems}
    for system in systems:
        found[system]["resident"] = _bytes_per_request(system, total, _resident_bytes)
    tracemalloc.start()
    try:
        for system in systems:
            found[system]["allocated"] = _bytes_per_request(system, total // 5, _allocated_bytes)
    finally:
        tracemalloc.stop()
    return found
