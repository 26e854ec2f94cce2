"""What a simulated request leaves behind in memory; part of `simulator_speed.py`."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from vllm_ext.simulation import run as runs
from vllm_ext.simulation.cost.fitted import Fitted
from vllm_ext.simulation.spec import EngineSpec, SimulationSpec
from vllm_ext.simulation.workloads.requests import SimRequest

_CLIENTS = 32


class _ShortRequests:
    """A closed loop of many short requests, which looks at the process' memory on the way."""

    name, rows, sha256 = "short requests", 0, ""

    def __init__(self, total: int, size_bytes: Callable[[], int]) -> None:
        self.total = total
        self.sizes: list[tuple[int, int]] = []
        """(requests sent, bytes)"""
        self._size_bytes = size_bytes
        self._sent = 0

    def start(self) -> Iterator[SimRequest]:
        return (self._next(0.0) for _ in range(_CLIENTS))

    def after(self, request: SimRequest, finished_s: float, output_ids: Sequence[int]) -> Iterable[SimRequest]:
        if self._sent >= self.total:
            return ()
        if self._sent in (self.total // 5, self.total - _CLIENTS):
            gc.collect()
            self.sizes.append((self._sent, self._size_bytes()))
        return (self._next(finished_s),)

    def _next(self, arrival_s: float) -> SimRequest:
        self._sent += 1
        prompt, output = 16 + self._sent % 64, 1 + self._sent % 3
        return SimRequest(
            req_id=f"request-{self._sent}",
            arrival_s=arrival_s,
            prompt_tokens=prompt,
            output_tokens=output,
            max_tokens=64,
        )


def _resident_bytes() -> int:
    """Memory of this process, in bytes; raises OSError where the system is not Linux."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _bytes_per_request(system: str, total: int, size_bytes: Callable[[], int]) -> float:
    """What one more request leaves in memory at the end of a long run."""
    workload = _ShortRequests(total, size_bytes)
    spec = SimulationSpec(engine=EngineSpec(system=system, num_blocks=2000))
    runs.simulate(spec, workload=workload, cost=Fitted.constant(0.02))
    (few, small), (many, large) = workload.sizes
    return round((large - small) / (many - few), 1)


def memory(systems: Sequence[str], total: int) -> dict[str, dict[str, float]]:
    """Bytes per request by system: resident, and allocated (as `tracemalloc` counts) in a run of a fifth of it."""
    found = {system: {"resident": _bytes_per_request(system, total, _resident_bytes)} for system in systems}
    tracemalloc.start()
    try:
        for system in systems:
            allocated = _bytes_per_request(system, total // 5, lambda: tracemalloc.get_traced_memory()[0])
            found[system]["allocated"] = allocated
    finally:
        tracemalloc.stop()
    return found
