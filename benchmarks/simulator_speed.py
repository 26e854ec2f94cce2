"""How fast is the simulator, and what does it add to the scheduler's own cost?

Question: how many seconds of a server's life are simulated in one second, and which part of that second is not vLLM's
scheduler? The scheduler is the real one, so its cost is the floor; the rest is events, tokens, statistics and the
building of requests.

Method: OPT-13B with the roofline cost model, async scheduling and prefix caching, ShareGPT-like lengths. A closed loop
of as many clients as are to run keeps the batch at that size; where 40 GB do not hold so many, the 80 GB device is
taken. Then a trace of 30 minutes at a published rate. Time inside `schedule`, `update_from_output` and `add_request` is
measured by wrapping them; whatever is left of the run (without the building of the scheduler) is the simulator's. Best
of n runs, systems taking turns (the trace runs once). Measured is the CPU time of the thread, which a busy machine
stretches less than wall time; a run neither waits nor does I/O, so on an idle machine both agree (``--wall`` measures
wall time). Memory: many short requests through one run, the process' resident size and, in a shorter run, Python's own
count of allocated bytes, after a fifth of the requests and at the end; the slope is what a request leaves behind.

Output: virtual seconds per second, total over scheduler, microseconds per step by part, bytes per request.

    python benchmarks/simulator_speed.py --quick
    python benchmarks/simulator_speed.py --out benchmarks/results/simulator_speed.json
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from simulator_memory import memory
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_ext.observability.results import Goal, Result, Workload, add_arguments, command, emit, format_table
from vllm_ext.simulation import run as runs
from vllm_ext.simulation.cost.spec import CostSpec, HardwareSpec
from vllm_ext.simulation.request_factory import RequestFactory
from vllm_ext.simulation.run_data import RunData
from vllm_ext.simulation.spec import EngineSpec, SimulationSpec
from vllm_ext.simulation.workloads.build import build as build_workload
from vllm_ext.simulation.workloads.spec import WorkloadSpec

SYSTEMS = ("upstream-fcfs", "fcfs", "alise")
SCHEDULER_CALLS = ("schedule", "update_from_output", "add_request", "finish_requests")
TRACE_DEVICE = "a100-40"
TRACE_S, TRACE_RATE_PER_S, TRACE_GOAL_S = 1800.0, 2.0, 60.0
OVERHEAD_GOAL, SMALL_BATCH_GOAL, LARGE_BATCH_GOAL = 1.30, 500.0, 30.0
BYTES_GOAL = 1000.0
MILLION = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Load:
    """So many requests at a time on one device."""

    clients: int
    device: str
    requests: int
    """Of the full measurement; ``--quick`` takes a quarter. Several times the clients: the last ones run alone."""

    @property
    def key(self) -> str:
        return f"{self.clients}_clients"


LOADS = (
    Load(clients=4, device="a100-40", requests=160),
    Load(clients=32, device="a100-40", requests=640),
    Load(clients=160, device="a100-80", requests=2560),
)


@dataclass
class Parts:
    """Seconds of one run, by who took them."""

    scheduler: float = 0.0
    requests: float = 0.0
    """Building vLLM's requests, block hashes included, as its front end and engine core do."""
    setup: float = 0.0
    total: float = 0.0

    @property
    def simulator(self) -> float:
        """What is neither the scheduler's nor setup; `requests` is part of it."""
        return self.total - self.scheduler


@dataclass(kw_only=True)
class Timed:
    """Best run of one system under one load."""

    parts: Parts
    data: RunData

    @property
    def speed(self) -> float:
        return self.data.duration_s / self.parts.total

    @property
    def overhead(self) -> float:
        return self.parts.total / self.parts.scheduler

    def per_step_us(self, seconds: float) -> float:
        return seconds / self.data.counters["steps"] * 1e6


def spec_of(load: Load, system: str, requests: int, seed: int) -> SimulationSpec:
    """The run of one cell."""
    return SimulationSpec(
        engine=EngineSpec(system=system),
        hardware=HardwareSpec(model="opt-13b", device=load.device),
        workload=WorkloadSpec(arrivals="closed-loop", clients=load.clients, num_requests=requests, seed=seed),
    )


def trace_of(system: str, duration_s: float, seed: int) -> SimulationSpec:
    """OPT-13B on 40 GB at the rate up to which the vLLM paper (figure 12) serves it with ShareGPT's lengths."""
    return SimulationSpec(
        engine=EngineSpec(system=system),
        hardware=HardwareSpec(model="opt-13b", device=TRACE_DEVICE),
        workload=WorkloadSpec(
            source="sharegpt-vllm",
            rate_per_s=TRACE_RATE_PER_S,
            duration_s=duration_s,
            max_model_len=2048,
            over_context="cut",
            seed=seed,
        ),
    )


def wrapped(function: Callable[..., Any], timer: Callable[[], float], note: Callable[[float], None]) -> Any:
    """The same function, its time told to ``note``."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = timer()
        try:
            return function(*args, **kwargs)
        finally:
            note(timer() - started)

    return timed


def measure(spec: SimulationSpec, timer: Callable[[], float]) -> Timed:
    """Run once, through the public entrance, with the scheduler's methods wrapped."""
    parts = Parts()

    def note_scheduler(seconds: float) -> None:
        parts.scheduler += seconds

    def note_request(seconds: float) -> None:
        parts.requests += seconds

    real_build = runs.build_scheduler

    def build(*args: Any, **kwargs: Any) -> Scheduler:
        started = timer()
        scheduler = real_build(*args, **kwargs)
        for name in SCHEDULER_CALLS:
            setattr(scheduler, name, wrapped(getattr(scheduler, name), timer, note_scheduler))
        parts.setup = timer() - started
        return scheduler

    call = wrapped(RequestFactory.__call__, timer, note_request)
    gc.collect()
    with mock.patch.object(runs, "build_scheduler", build), mock.patch.object(RequestFactory, "__call__", call):
        started = timer()
        data = runs.simulate(spec)
        parts.total = timer() - started - parts.setup
    return Timed(parts=parts, data=data)


def best_runs(load: Load, requests: int, repeats: int, seed: int, timer: Callable[[], float]) -> dict[str, Timed]:
    """The quickest run of each system; they take turns."""
    found: dict[str, Timed] = {}
    for _ in range(repeats):
        for system in SYSTEMS:
            timed = measure(spec_of(load, system, requests, seed), timer)
            if system not in found or timed.parts.total < found[system].parts.total:
                found[system] = timed
    return found


# --- output -----------------------------------------------------------------------------------------------------------


def metrics_of(name: str, found: dict[str, Timed]) -> dict[str, float]:
    """Flat metrics of one load, or of the trace."""
    metrics = {}
    for system, timed in found.items():
        key, parts = f"{system}_{name}", timed.parts
        metrics |= {
            f"{key}_virtual_s_per_s": round(timed.speed, 1),
            f"{key}_total_over_scheduler": round(timed.overhead, 4),
            f"{key}_scheduler_us_per_step": round(timed.per_step_us(parts.scheduler), 1),
            f"{key}_simulator_us_per_step": round(timed.per_step_us(parts.simulator), 1),
            f"{key}_requests_us_per_step": round(timed.per_step_us(parts.requests), 1),
            f"{key}_mean_running_requests": round(timed.data.counters["mean_running_requests"], 2),
            f"{key}_steps": timed.data.counters["steps"],
        }
    return metrics


def table_of(cells: dict[Load, dict[str, Timed]]) -> str:
    header = ["system", "running", "steps", "x real time", "scheduler us", "simulator us", "(requests us)", "ratio"]
    rows = [
        [
            system,
            round(timed.data.counters["mean_running_requests"], 1),
            int(timed.data.counters["steps"]),
            timed.speed,
            timed.per_step_us(timed.parts.scheduler),
            timed.per_step_us(timed.parts.simulator),
            timed.per_step_us(timed.parts.requests),
            timed.overhead,
        ]
        for found in cells.values()
        for system, timed in found.items()
    ]
    return format_table(header, rows)


def trace_goal(traces: dict[str, Timed], duration_s: float) -> Goal:
    """The slowest system counts; a shorter trace is given less time."""
    system, timed = max(traces.items(), key=lambda item: item[1].parts.total)
    note = f"{system}: {timed.data.duration_s:.0f} s of virtual time, {timed.speed:.0f} times real time"
    goal = TRACE_GOAL_S * duration_s / TRACE_S
    return Goal(metric="worst_trace_run_s", value=round(timed.parts.total, 2), op="<=", goal=goal, note=note)


def goals_of(cells: dict[Load, dict[str, Timed]], per_request: dict[str, dict[str, float]]) -> list[Goal]:
    """Compare with what was wanted; the worst system counts."""
    goals = []
    loads = list(cells)
    for load, found in cells.items():
        system = max(found, key=lambda name: found[name].overhead)
        timed = found[system]
        ours, theirs = timed.per_step_us(timed.parts.simulator), timed.per_step_us(timed.parts.scheduler)
        note = f"{system}: simulator {ours:.0f} us per step on the scheduler's {theirs:.0f} us"
        metric = f"worst_total_over_scheduler_{load.key}"
        goals.append(Goal(metric=metric, value=round(timed.overhead, 4), op="<=", goal=OVERHEAD_GOAL, note=note))
    for load, goal in ((loads[0], SMALL_BATCH_GOAL), (loads[-1], LARGE_BATCH_GOAL)):
        system = min(cells[load], key=lambda name: cells[load][name].speed)
        timed = cells[load][system]
        scheduler_alone = timed.data.duration_s / timed.parts.scheduler
        note = f"{system}; the scheduler alone would allow {scheduler_alone:.0f}"
        metric = f"least_virtual_s_per_s_{load.key}"
        goals.append(Goal(metric=metric, value=round(timed.speed, 1), op=">=", goal=goal, note=note))
    for kind in ("resident", "allocated"):
        system = max(per_request, key=lambda name: per_request[name][kind])
        value = per_request[system][kind]
        note = f"{system}: a million requests would take {value * MILLION / 2**20:.0f} MiB"
        metric = f"worst_{kind}_bytes_per_request"
        goals.append(Goal(metric=metric, value=value, op="<=", goal=BYTES_GOAL, note=note))
    return goals


def main(argv: Sequence[str]) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--wall", action="store_true", help="measure wall time instead of CPU time")
    args = parser.parse_args(argv)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    timer = time.perf_counter if args.wall else time.thread_time
    repeats, share, short = (2, 4, 10_000) if args.quick else (5, 1, 100_000)
    cells = {load: best_runs(load, load.requests // share, repeats, args.seed, timer) for load in LOADS}
    duration_s = TRACE_S / (10 if args.quick else 1)
    traces = {system: measure(trace_of(system, duration_s, args.seed), timer) for system in SYSTEMS}
    per_request = memory(SYSTEMS, short)
    tables = [
        table_of(cells),
        format_table(
            [f"trace of {duration_s:.0f} s at {TRACE_RATE_PER_S:g} requests/s", "seconds", "x real time", "running"],
            [[s, t.parts.total, t.speed, t.data.counters["mean_running_requests"]] for s, t in traces.items()],
        ),
        format_table(
            ["system", "resident bytes per request", "allocated bytes per request", "MiB per million"],
            [[name, *sizes.values(), max(sizes.values()) * MILLION / 2**20] for name, sizes in per_request.items()],
        ),
    ]
    metrics = {}
    for name, found in {**{load.key: cell for load, cell in cells.items()}, "trace": traces}.items():
        metrics |= metrics_of(name, found)
    for system, timed in traces.items():
        metrics[f"{system}_trace_run_s"] = round(timed.parts.total, 2)
        metrics[f"{system}_trace_requests"] = float(len(timed.data.requests))
    for system, sizes in per_request.items():
        metrics |= {f"{system}_{kind}_bytes_per_request": size for kind, size in sizes.items()}
    workload = build_workload(spec_of(LOADS[0], SYSTEMS[0], 1, args.seed).workload)
    result = Result(
        name="simulator_speed",
        command=command(argv, "benchmarks/simulator_speed.py"),
        config={
            "model": "opt-13b",
            "loads": [{"clients": load.clients, "device": load.device} for load in LOADS],
            "requests": [load.requests // share for load in LOADS],
            "cost": CostSpec().model_dump(exclude_none=True),
            "trace": {"duration_s": duration_s, "rate_per_s": TRACE_RATE_PER_S, "device": TRACE_DEVICE},
            "repeats": repeats,
            "timer": timer.__name__,
            "short_requests": short,
        },
        seed=args.seed,
        workload=Workload(name=workload.name, rows=workload.rows, sha256=workload.sha256),
        metrics=metrics,
        goals=[*goals_of(cells, per_request), trace_goal(traces, duration_s)],
    )
    emit(result, tables, args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
