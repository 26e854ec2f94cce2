"""Runs without a simulator, for tests: metrics that are a plain function of the description.

A module of its own, imported by name, so that other processes find the functions.
"""

from __future__ import annotations

import os
import signal

from vllm_ext.simulation.spec import SimulationSpec

CAPACITY = {"fcfs": 3.0, "alise": 5.0}
"""Rate per second up to which the fake latency stays within 100 ms."""


def latency(spec: SimulationSpec) -> dict[str, float]:
    """100 ms at the system's capacity, in proportion to the rate; 1 ms more per seed."""
    rate = spec.workload.rate_per_s or 0.0
    return {"requests": 10.0, "latency_ms": 100.0 * rate / CAPACITY[spec.engine.system] + spec.workload.seed}


def fails_at_two(spec: SimulationSpec) -> dict[str, float]:
    """As `latency`, but raises at 2 requests per second."""
    if spec.workload.rate_per_s == 2.0:
        raise ArithmeticError("two is too many")
    return latency(spec)


def dies_at_two(spec: SimulationSpec) -> dict[str, float]:
    """As `latency`, but its process is killed at 2 requests per second."""
    if spec.workload.rate_per_s == 2.0:
        os.kill(os.getpid(), signal.SIGKILL)
    return latency(spec)


def process_id(spec: SimulationSpec) -> dict[str, float]:
    """The process that ran it."""
    return {"pid": float(os.getpid())}
