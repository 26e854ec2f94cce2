"""Fingerprints of simulated runs, to compare within a process and between processes."""

from __future__ import annotations

import itertools

from tests.support.simulation_parts import PerTokenCost, busy_hour, crowd, fingerprint, simulate
from vllm_ext.simulation.spec import RecordSpec
from vllm_ext.simulation.workloads.requests import SimRequest

_EVERYTHING = RecordSpec(token_times=True, events=100_000, decisions=True)


def digest(system: str, depth: int, asked: list[SimRequest] | None = None) -> str:
    """Fingerprint of a run with arrivals, aborts and memory pressure, with prefix caching."""
    data, decisions = simulate(
        busy_hour() if asked is None else asked,
        PerTokenCost(),
        num_blocks=14,
        system=system,
        prefix_caching=True,
        async_scheduling=depth == 2,
        record=_EVERYTHING,
    )
    return fingerprint(data, decisions)


def digests() -> str:
    """Fingerprints on two workloads, synchronous and asynchronous."""
    lines = []
    for system, depth in itertools.product(("upstream-fcfs", "fcfs", "oracle-alise"), (1, 2)):
        found = [digest(system, depth, asked) for asked in (busy_hour(), crowd())]
        lines.append(f"{system} depth {depth}: {' '.join(found)}")
    return "\n".join(lines)
