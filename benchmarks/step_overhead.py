"""What does steering cost a scheduler step?

Question: how long do ``schedule()`` and ``update_from_output()`` take under our systems, compared with upstream's
AsyncScheduler, and does the cost grow with the waiting queue?

Method: real schedulers on real KV cache managers in one process, no model. N requests decode (every seat taken), M
wait; a fabricated runner, outside the timing, returns one token each. Two steps are in flight, as in async scheduling;
prefix caching and statistics are on. The systems take turns in blocks of a few steps, in an order that rotates, so that
noise of the machine meets all alike. Measured is the CPU time of the thread, which a busy machine stretches less than
wall time; the path neither waits nor does I/O, so on an idle machine both agree (``--wall`` measures wall time).
Virtual time passes 20 ms per step, and the waiting requests arrived spread over one aging period, so that ranks expire
at the rate of a full queue. The garbage collector is off while steps are timed (``--gc`` leaves it on), runs between
cells, and is treated the same for all.

Output: median time per step, the ratio of medians to upstream's, and its 95 % interval from resampled blocks.

    python benchmarks/step_overhead.py --quick
    python benchmarks/step_overhead.py --out benchmarks/results/step_overhead.json
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_ext.observability.results import Goal, Result, Workload, add_arguments, command, emit, format_table
from vllm_ext.simulation.fake_runner import FakeRunner
from vllm_ext.simulation.harness import block_hasher, make_requests, make_scheduler
from vllm_ext.simulation.virtual_clock import VirtualClock

STEERED = "vllm_ext.scheduling.scheduler.SteeredScheduler"
BASELINE = "upstream"
SYSTEMS: Mapping[str, str | None] = {BASELINE: None, "fcfs": STEERED, "alise": STEERED}
STEP_S = 0.02
AGE_LIMIT_S = 20.0
PROMPT_TOKENS = 16
PREDICTED_TOKENS = 2000
MAX_TOKENS = 8000
WARMUP_STEPS = 20
FCFS_GOAL, ALISE_GOAL, FLATNESS_GOAL = 1.05, 1.20, 1.10


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One point of the grid."""

    running: int
    waiting: int

    @property
    def key(self) -> str:
        return f"{self.running}_running_{self.waiting}_waiting"


@dataclass
class Times:
    """Per-step times of one system in one cell, one list per block, in seconds."""

    schedule: list[list[float]] = field(default_factory=list)
    update: list[list[float]] = field(default_factory=list)

    def total(self) -> np.ndarray:
        """[blocks, steps per block]"""
        return np.array(self.schedule) + np.array(self.update)


class Subject:
    """A scheduler in the steady state: every seat decodes, the rest waits."""

    def __init__(self, name: str, cell: Cell, steps: int, timer: Callable[[], float]) -> None:
        self.timer = timer
        self.clock = VirtualClock(1000.0)
        self.times = Times()
        self.preempted = 0
        blocks_per_request = -(-(PROMPT_TOKENS + steps + WARMUP_STEPS + 16) // 16) + 1
        self.scheduler = make_scheduler(
            SYSTEMS[name],
            num_blocks=cell.running * blocks_per_request + 64,
            max_num_seqs=cell.running,
            max_num_batched_tokens=8192,
            max_model_len=16384,
            async_scheduling=True,
            additional_config={"vllm_ext": {"system": name}} if SYSTEMS[name] else {},
        )
        if SYSTEMS[name]:
            self.scheduler.clock = self.clock
        self.runner = FakeRunner(pipelined=True, verify_kv=False)
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._add("run", cell.running, over_s=0.0)
        for _ in range(WARMUP_STEPS // 2):
            self.step()
        self._add("wait", cell.waiting, over_s=AGE_LIMIT_S)
        for _ in range(WARMUP_STEPS // 2):
            self.step()
        if len(self.scheduler.running) != cell.running:
            raise RuntimeError(f"{name}: {len(self.scheduler.running)} requests run instead of {cell.running}")

    def _add(self, prefix: str, count: int, over_s: float) -> None:
        hints = {"osl": PREDICTED_TOKENS}
        for request in make_requests(prefix, count, PROMPT_TOKENS, MAX_TOKENS, extra_args=hints, hasher=block_hasher()):
            self.clock.advance(over_s / count)
            request.arrival_time = self.clock()
            self.scheduler.add_request(request)

    def step(self) -> tuple[float, float]:
        """Schedule a step, process the output of the one before; return the seconds of both calls."""
        self.clock.advance(STEP_S)
        start = self.timer()
        output = self.scheduler.schedule()
        schedule_s = self.timer() - start
        self.preempted += len(output.preempted_req_ids or ())
        self._in_flight.append((output, self.runner.execute(output)))
        if len(self._in_flight) < 2:
            return schedule_s, 0.0
        done, result = self._in_flight.popleft()
        start = self.timer()
        self.scheduler.update_from_output(done, result)
        return schedule_s, self.timer() - start

    def block(self, steps: int) -> None:
        """Take one block of timed steps."""
        pairs = [self.step() for _ in range(steps)]
        self.times.schedule.append([schedule_s for schedule_s, _ in pairs])
        self.times.update.append([update_s for _, update_s in pairs])


def measure(
    cell: Cell, blocks: int, steps_per_block: int, *, keep_gc: bool, timer: Callable[[], float]
) -> dict[str, Subject]:
    """Time every system in one cell, taking turns."""
    subjects = {name: Subject(name, cell, blocks * steps_per_block, timer) for name in SYSTEMS}
    names = list(subjects)
    gc.collect()
    gc.freeze()
    if not keep_gc:
        gc.disable()
    try:
        for number in range(blocks):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                subjects[name].block(steps_per_block)
    finally:
        gc.enable()
        gc.unfreeze()
    return subjects


def ratio_interval(ours: np.ndarray, base: np.ndarray, rng: np.random.Generator) -> tuple[float, float, float]:
    """Ratio of medians and its 95 % interval; blocks, not steps, are resampled, because neighbours are alike."""
    picks = rng.integers(0, len(ours), size=(1000, len(ours)))
    ratios = [np.median(ours[pick]) / np.median(base[pick]) for pick in picks]
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(np.median(ours) / np.median(base)), float(low), float(high)


def summarise(
    cells: Mapping[Cell, dict[str, Subject]], seed: int
) -> tuple[dict[str, dict[str, float]], list[list[object]]]:
    """Metrics per system, and the rows of the table."""
    rng = np.random.default_rng(seed)
    found: dict[str, dict[str, float]] = {name: {} for name in SYSTEMS}
    rows: list[list[object]] = []
    for cell, subjects in cells.items():
        base = subjects[BASELINE].times.total()
        for name, subject in subjects.items():
            ratio, low, high = ratio_interval(subject.times.total(), base, rng)
            median_us = float(np.median(subject.times.total()) * 1e6)
            schedule_us, update_us = (float(np.median(t) * 1e6) for t in (subject.times.schedule, subject.times.update))
            p99_us = float(np.percentile(subject.times.total(), 99) * 1e6)
            found[name] |= {
                f"{cell.key}_step_us": round(median_us, 1),
                f"{cell.key}_schedule_us": round(schedule_us, 1),
                f"{cell.key}_update_us": round(update_us, 1),
                f"{cell.key}_step_p99_us": round(p99_us, 1),
                f"{cell.key}_preemptions": float(subject.preempted),
            }
            if name != BASELINE:
                found[name] |= {
                    f"{cell.key}_ratio": round(ratio, 4),
                    f"{cell.key}_ratio_ci_low": round(low, 4),
                    f"{cell.key}_ratio_ci_high": round(high, 4),
                }
            interval = f"{low:.3f}..{high:.3f}"
            rows.append([cell.running, cell.waiting, name, schedule_us, update_us, median_us, p99_us, ratio, interval])
    return found, rows


def flatness(found: Mapping[str, float], running: int, waiting: Sequence[int]) -> float:
    """Cost with the longest queue over the cost with none."""
    longest = found[Cell(running=running, waiting=max(waiting)).key + "_step_us"]
    return longest / found[Cell(running=running, waiting=min(waiting)).key + "_step_us"]


def goals(found: Mapping[str, Mapping[str, float]], running: int, waiting: Sequence[int]) -> list[Goal]:
    """Compare with what was wanted, at the larger batch and the worst queue length."""
    result = []
    for name, limit in (("fcfs", FCFS_GOAL), ("alise", ALISE_GOAL)):
        worst = max((Cell(running=running, waiting=w) for w in waiting), key=lambda c: found[name][c.key + "_ratio"])
        ours, base, key = found[name], found[BASELINE], worst.key
        extra = {part: ours[f"{key}_{part}_us"] - base[f"{key}_{part}_us"] for part in ("schedule", "update")}
        note = (
            f"worst at {worst.waiting} waiting: schedule {extra['schedule']:+.0f} us, update {extra['update']:+.0f} us "
            f"on upstream's {base[key + '_step_us']:.0f} us"
        )
        value = ours[key + "_ratio"]
        result.append(Goal(metric=f"{name}_worst_ratio_{running}_running", value=value, op="<=", goal=limit, note=note))
    own, upstream = (flatness(found[name], running, waiting) for name in ("alise", BASELINE))
    note = f"alise {own:.3f}, upstream {upstream:.3f}: cost with {max(waiting)} waiting over cost with {min(waiting)}"
    metric = f"alise_growth_over_upstream_growth_{running}_running"
    result.append(Goal(metric=metric, value=round(own / upstream, 4), op="<=", goal=FLATNESS_GOAL, note=note))
    return result


def main(argv: Sequence[str]) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--gc", action="store_true", help="leave the garbage collector on while steps are timed")
    parser.add_argument("--wall", action="store_true", help="measure wall time instead of CPU time")
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256], help="running requests (default: 64 256)")
    parser.add_argument("--waiting", type=int, nargs="+", help="waiting requests (default: 0 1000 10000 100000)")
    args = parser.parse_args(argv)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    waiting = args.waiting or ([0, 1000, 10000] if args.quick else [0, 1000, 10000, 100000])
    blocks, steps_per_block = (24, 5) if args.quick else (90, 5)
    timer = time.perf_counter if args.wall else time.thread_time
    cells = {}
    for cell in (Cell(running=r, waiting=w) for r in args.running for w in waiting):
        cells[cell] = measure(cell, blocks, steps_per_block, keep_gc=args.gc, timer=timer)
        for subject in cells[cell].values():
            del subject.scheduler, subject.runner  # a long queue holds gigabytes
        gc.collect()
    found, rows = summarise(cells, args.seed)
    header = ["running", "waiting", "system", "schedule us", "update us", "step us", "p99 us", "ratio", "95 % interval"]
    config = {
        "running": args.running,
        "waiting": waiting,
        "blocks": blocks,
        "steps_per_block": steps_per_block,
        "depth": 2,
        "prefix_caching": True,
        "log_stats": True,
        "gc_while_timed": args.gc,
        "timer": timer.__name__,
        "step_s_virtual": STEP_S,
        "waiting_spread_s": AGE_LIMIT_S,
        "prompt_tokens": PROMPT_TOKENS,
        "predicted_tokens": PREDICTED_TOKENS,
    }
    total = max(args.running) + max(waiting)
    checksum = hashlib.sha256(f"{PROMPT_TOKENS} {PREDICTED_TOKENS} {MAX_TOKENS} {total}".encode()).hexdigest()
    metrics = {f"{name}_{key}": value for name in SYSTEMS if name != BASELINE for key, value in found[name].items()}
    baseline = {
        f"{name}_{key}": value for name in SYSTEMS if name != BASELINE for key, value in found[BASELINE].items()
    }
    result = Result(
        name="step_overhead",
        command=command(argv, "benchmarks/step_overhead.py"),
        config=config,
        seed=args.seed,
        workload=Workload(name="steady-decode", rows=total, sha256=checksum),
        metrics=metrics,
        baselines={BASELINE: baseline},
        goals=goals(found, max(args.running), waiting),
    )
    emit(result, [format_table(header, rows)], args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
