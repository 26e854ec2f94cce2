"""How fast is the simulator, and what does hiding requests from vLLM's scheduler gain?

Question: how many seconds of a server's life are simulated in one second, and how many would be if the scheduler were
told of every request in every step (``exact``)?

Method: OPT-13B with the roofline cost model, async scheduling and prefix caching, ShareGPT-like lengths. A closed loop
of as many clients as are to run keeps the batch at that size; where 40 GB do not hold so many, the 80 GB device is
taken. Then a trace of 30 minutes at a published rate. Both ways take turns, and must leave the same rows and gaps.
Without the building of the scheduler. Measured is the CPU time of the thread, which a busy machine stretches less than
wall time; a run neither waits nor does I/O, so on an idle machine both agree (``--wall`` measures wall time). Speeds
are of the quickest run of each, ratios of the pairs: their median, and the least and largest. Memory: many short
requests through one run, the process' resident size and, in a shorter run, Python's own count of allocated bytes, after
a fifth of the requests and at the end; the slope is what a request leaves behind.

Output: virtual seconds per second, exact time over quick time, bytes per request.

    python benchmarks/simulated/simulator_speed.py --quick
    python benchmarks/simulated/simulator_speed.py --out benchmarks/results/simulator_speed.json
"""

from __future__ import annotations

import gc
import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from simulator_memory import memory
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_ext.report.claim import Claim
from vllm_ext.report.results import Result, Workload, argument_parser, command, emit
from vllm_ext.report.table import Table
from vllm_ext.simulation import run as runs
from vllm_ext.simulation.cost.spec import CostSpec, HardwareSpec
from vllm_ext.simulation.measure.run_data import RunData
from vllm_ext.simulation.spec import EngineSpec, SimulationSpec
from vllm_ext.simulation.workloads.build import build as build_workload
from vllm_ext.simulation.workloads.spec import WorkloadSpec

SYSTEMS = ("upstream-fcfs", "fcfs", "alise", "auto")
TRACE_DEVICE = "a100-40"
TRACE_S, TRACE_RATE_PER_S, TRACE_GOAL_S = 1800.0, 2.0, 60.0
SPEED_GOALS = {("upstream-fcfs", 4): 500.0, ("upstream-fcfs", 160): 100.0, ("alise", 4): 300.0, ("alise", 160): 80.0}
BYTES_GOAL = 1000.0
MILLION = 1_000_000


LOADS = {4: ("a100-40", 160), 32: ("a100-40", 640), 160: ("a100-80", 2560)}
"""Clients at a time -> device, and requests of the full measurement (``--quick`` takes a quarter): several times the
clients, as the last ones run alone."""


@dataclass(kw_only=True)
class Pairs:
    """Runs of one system under one load: told of everybody, and of those for whom something happens."""

    exact_s: list[float]
    quick_s: list[float]
    data: RunData

    @property
    def speed(self) -> float:
        return self.data.duration_s / min(self.quick_s)

    @property
    def ratios(self) -> list[float]:
        return sorted(exact / quick for exact, quick in zip(self.exact_s, self.quick_s, strict=True))


COLUMNS: dict[str, tuple[str, int, Callable[[Pairs], float]]] = {
    "mean_running_requests": ("running", 2, lambda p: p.data.counters["mean_running_requests"]),
    "steps": ("steps", 0, lambda p: p.data.counters["steps"]),
    "virtual_s_per_s": ("x real time", 1, lambda p: p.speed),
    "exact_virtual_s_per_s": ("exact", 1, lambda p: p.data.duration_s / min(p.exact_s)),
    "exact_over_quick": ("exact / quick", 3, lambda p: statistics.median(p.ratios)),
    "exact_over_quick_least": ("from", 3, lambda p: p.ratios[0]),
    "exact_over_quick_largest": ("to", 3, lambda p: p.ratios[-1]),
    "us_per_step": ("us a step", 1, lambda p: min(p.quick_s) / p.data.counters["steps"] * 1e6),
}
"""Metric -> heading in the table, digits, value."""


def values_of(pairs: Pairs) -> dict[str, float]:
    return {name: round(value(pairs), digits) for name, (_, digits, value) in COLUMNS.items()}


def spec_of(clients: int, system: str, requests: int, seed: int) -> SimulationSpec:
    """The run of one cell."""
    return SimulationSpec(
        engine=EngineSpec(system=system),
        hardware=HardwareSpec(model="opt-13b", device=LOADS[clients][0]),
        workload=WorkloadSpec(arrivals="closed-loop", clients=clients, num_requests=requests, seed=seed),
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


def measure(spec: SimulationSpec, timer: Callable[[], float]) -> tuple[float, RunData]:
    """Run once, through the public entrance; return the seconds without the building of the scheduler."""
    setup_s = 0.0
    real_build = runs.build_scheduler

    def build(*args: Any, **kwargs: Any) -> Scheduler:
        nonlocal setup_s
        started = timer()
        scheduler = real_build(*args, **kwargs)
        setup_s = timer() - started
        return scheduler

    gc.collect()
    with mock.patch.object(runs, "build_scheduler", build):
        started = timer()
        data = runs.simulate(spec)
        return timer() - started - setup_s, data


def in_turns(spec: SimulationSpec, repeats: int, timer: Callable[[], float]) -> Pairs:
    """Run both ways in turn.

    Raises:
        RuntimeError: their rows, counters or gaps differ.
    """
    exact_s, quick_s, left = [], [], []
    for _ in range(repeats):
        for exact, seconds in ((True, exact_s), (False, quick_s)):
            took_s, data = measure(spec.model_copy(update={"exact": exact}), timer)
            seconds.append(took_s)
            left.append(repr((list(data.requests.rows()), data.counters, data.gaps.count, data.gaps.total_s)))
    if len(set(left)) > 1:
        raise RuntimeError(f"{spec.engine.system}: hiding requests changed the results of {spec.workload}")
    return Pairs(exact_s=exact_s, quick_s=quick_s, data=data)


# --- output -----------------------------------------------------------------------------------------------------------


def table_of(cells: dict[str, dict[str, Pairs]]) -> Table:
    rows = [
        [name, system, *values_of(pairs).values()] for name, found in cells.items() for system, pairs in found.items()
    ]
    return Table(["load", "system", *(heading for heading, *_ in COLUMNS.values())], rows)


def claims_of(cells: dict[str, dict[str, Pairs]], per_request: dict[str, dict[str, float]]) -> list[Claim]:
    """Compare with what was wanted."""
    claims = []
    for (system, clients), goal in SPEED_GOALS.items():
        load = f"{clients}_clients"
        found = values_of(cells[load][system])
        note = f"{found['us_per_step']:.0f} us a step; told of everybody {found['exact_virtual_s_per_s']:.0f}"
        metric = f"{system}_{load}_virtual_s_per_s"
        claims.append(Claim(name=metric, value=found["virtual_s_per_s"], op=">=", goal=goal, facts=note))
    for kind in ("resident", "allocated"):
        system = max(per_request, key=lambda name: per_request[name][kind])
        value = per_request[system][kind]
        note = f"{system}: a million requests would take {value * MILLION / 2**20:.0f} MiB"
        metric = f"worst_{kind}_bytes_per_request"
        claims.append(Claim(name=metric, value=value, op="<=", goal=BYTES_GOAL, facts=note))
    return claims


def trace_claim(traces: dict[str, Pairs], duration_s: float) -> Claim:
    """The slowest system counts; a shorter trace is given less time."""
    system, pairs = max(traces.items(), key=lambda item: min(item[1].quick_s))
    note = f"{system}: {pairs.data.duration_s:.0f} s of virtual time, {pairs.speed:.0f} times real time"
    goal = TRACE_GOAL_S * duration_s / TRACE_S
    return Claim(name="worst_trace_run_s", value=round(min(pairs.quick_s), 2), op="<=", goal=goal, facts=note)


def main(argv: Sequence[str]) -> None:
    """Measure, print, write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--wall", action="store_true", help="measure wall time instead of CPU time")
    args = parser.parse_args(argv)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    timer = time.perf_counter if args.wall else time.thread_time
    repeats, share, short = (2, 4, 10_000) if args.quick else (5, 1, 100_000)
    cells = {
        f"{clients}_clients": {
            system: in_turns(spec_of(clients, system, requests // share, args.seed), repeats, timer)
            for system in SYSTEMS
        }
        for clients, (_, requests) in LOADS.items()
    }
    duration_s = TRACE_S / (10 if args.quick else 1)
    traces = {system: in_turns(trace_of(system, duration_s, args.seed), 1, timer) for system in SYSTEMS}
    per_request = memory(SYSTEMS, short)
    named = {**cells, "trace": traces}
    tables = [
        table_of(named),
        Table(
            ["system", "resident bytes per request", "allocated bytes per request", "MiB per million"],
            [[name, *sizes.values(), max(sizes.values()) * MILLION / 2**20] for name, sizes in per_request.items()],
        ),
    ]
    metrics = {
        f"{system}_{name}_{metric}": value
        for name, found in named.items()
        for system, pairs in found.items()
        for metric, value in values_of(pairs).items()
    }
    for system, pairs in traces.items():
        metrics[f"{system}_trace_run_s"] = round(min(pairs.quick_s), 2)
        metrics[f"{system}_trace_requests"] = float(len(pairs.data.requests))
    for system, sizes in per_request.items():
        metrics |= {f"{system}_{kind}_bytes_per_request": size for kind, size in sizes.items()}
    workload = build_workload(spec_of(min(LOADS), SYSTEMS[0], 1, args.seed).workload)
    result = Result(
        name="simulator_speed",
        command=command(argv, __file__),
        config={
            "model": "opt-13b",
            "loads": [{"clients": clients, "device": device} for clients, (device, _) in LOADS.items()],
            "requests": [requests // share for _, requests in LOADS.values()],
            "cost": CostSpec().model_dump(exclude_none=True),
            "trace": {"duration_s": duration_s, "rate_per_s": TRACE_RATE_PER_S, "device": TRACE_DEVICE},
            "repeats": repeats,
            "timer": timer.__name__,
            "short_requests": short,
        },
        seed=args.seed,
        workload=Workload(name=workload.name, rows=workload.rows, sha256=workload.sha256),
        metrics=metrics,
        claims=[*claims_of(cells, per_request), trace_claim(traces, duration_s)],
    )
    emit(result, tables, args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
