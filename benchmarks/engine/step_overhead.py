"""What does steering cost a scheduler step?

Question: how long do ``schedule()`` and ``update_from_output()`` take under our systems, compared with upstream's
AsyncScheduler, and does the cost grow with the waiting queue?

Method: real schedulers on real KV cache managers in one process, no model. N requests decode, M wait, all with latency
objectives; 1000 finished lengths are in the history; a fabricated runner, outside the timing, returns one token each.
Two steps are in flight, as in async scheduling; prefix caching and statistics are on. There are two states:

    seats     every seat is taken; admission policies answer at once
    memory    seats are free, and the head of the queue does not fit into KV memory: admission policies give their full
              answer in every step. Blocks outside the requests are taken or given back between steps to keep it so

Systems are measured in groups, because schedulers with long queues don't all fit into memory. Upstream is measured in
each group again, and a system is compared with the upstream of its own group. The members of a group take turns in
blocks of a few steps, in an order that rotates, so that noise of the machine meets all alike. Measured is the CPU time
of the thread, which a busy machine stretches less than wall time; the path neither waits nor does I/O, so on an idle
machine both agree (``--wall`` measures wall time).
Virtual time passes 20 ms per step, and the waiting requests arrived spread over 20 s, alise's aging period, so that its
ranks expire at the rate of a full queue. Objectives are so far off that nobody becomes urgent: preempting is work, not
overhead. The garbage collector is off while steps are timed (``--gc`` leaves it on), runs between cells, and is treated
the same for all. With 8 running a step is so short that the microseconds that policies take count, whatever the ratio.
fastserve has one quantum without an end: with its own it preempts in every step, for whoever comes.

Output: median time per step, the ratio of medians to upstream's, its 95 % interval from resampled blocks, and the time
in policies per step, absolute and as a share of a model's step of 25 ms.

    python benchmarks/engine/step_overhead.py --quick
    python benchmarks/engine/step_overhead.py --out benchmarks/results/step_overhead.json
    python benchmarks/engine/step_overhead.py --systems past-future,accelgen --running 256 --waiting 0 100000

A full run takes some 10 minutes of one core (25 on a busy one). Queues of 100,000 are measured for the systems whose
policies look at the queue in an order of their own, or forecast (`LONG_QUEUES`), the others up to 10,000.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import step_overhead_report as report
import step_overhead_subject as subject
from step_overhead_subject import BASELINE, Cell, Subject

from vllm_ext import systems
from vllm_ext.config import ConfigError
from vllm_ext.report.results import Result, Workload, argument_parser, command, emit
from vllm_ext.report.table import Table

COMPOSITIONS = ("alise+sarathi", "past-future+sarathi")
TIERS = ("fcfs:tier-early", "fcfs:tier-ahead", "fcfs:gaps")
LONG_QUEUES = ("fcfs", "alise", "fastserve", "accelgen", "past-future", "auto")
"""Systems measured with 100,000 waiting by default, where they are registered."""
QUICK_SYSTEMS = ("fcfs", "alise", "sarathi", "accelgen", "past-future", "past-future+sarathi")
LONG = 100_000
GROUP = 3
"""Systems per group, upstream not counted: with 100,000 waiting each holds more than a gigabyte."""
MEMORY_BOUND_WAITING = 1000


def measure(
    names: Sequence[str],
    cell: Cell,
    blocks: int,
    steps_per_block: int,
    *,
    keep_gc: bool = False,
    timer: Callable[[], float] = time.thread_time,
) -> dict[str, Subject]:
    """Time systems, upstream first, in one cell, taking turns; the schedulers themselves are gone afterwards.

    Raises:
        RuntimeError: a system does not keep the requests running that are to be timed.
    """
    subjects = {name: Subject(name, cell, timer) for name in (BASELINE, *names)}
    members = list(subjects)
    gc.collect()
    gc.freeze()
    if not keep_gc:
        gc.disable()
    try:
        for number in range(blocks):
            turn = number % len(members)
            for name in members[turn:] + members[:turn]:
                subjects[name].block(steps_per_block)
    finally:
        gc.enable()
        gc.unfreeze()
    for one in subjects.values():
        one.drop()
    gc.collect()
    return subjects


def groups(names: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """Split systems into groups; those that are measured with long queues come together, as they cost most."""
    ordered = [n for n in names if n in LONG_QUEUES] + [n for n in names if n not in LONG_QUEUES]
    found: list[tuple[str, ...]] = []
    for name in ordered:
        fits = found and len(found[-1]) < size and (found[-1][0] in LONG_QUEUES) == (name in LONG_QUEUES)
        found[-1:] = [(*found[-1], name)] if fits else [*found[-1:], (name,)]
    return found


def cells(group: Sequence[str], args: argparse.Namespace) -> Iterator[Cell]:
    """Return the points of the grid for one group."""
    waiting = args.waiting
    if waiting is None:
        long = [LONG] if group[0] in LONG_QUEUES and not args.quick else []
        waiting = [0, 1000, 10_000, *long]
    for running in args.running:
        for count in waiting:
            yield Cell(running=running, waiting=count)
        if args.memory_waiting:
            yield Cell(running=running, waiting=args.memory_waiting, memory_bound=True)


def default_systems(quick: bool) -> list[str]:
    """Return every system of the table that may serve, and some compositions; a few of them for a quick run."""
    names = [row.name for row in systems.table(unserved=True) if not row.oracle] + list(COMPOSITIONS)
    return [name for name in names if name in QUICK_SYSTEMS] if quick else [*names, *TIERS]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the command line; ends the process with a message if it is not usable."""
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--systems",
        help="comma list; SYSTEM:tier-early or -ahead has a KV tier, SYSTEM:gaps crosses gaps in kept KV, to be "
        "compared with SYSTEM in its group (default: all that may serve, some compositions, and these under fcfs)",
    )
    parser.add_argument("--gc", action="store_true", help="leave the garbage collector on while steps are timed")
    parser.add_argument("--wall", action="store_true", help="measure wall time instead of CPU time")
    parser.add_argument("--running", type=_count, nargs="+", help="running requests (default: 8 64 256; quick: 8 256)")
    parser.add_argument(
        "--waiting", type=int, nargs="+", help="waiting requests (default: 0 1000 10000, and 100000 for some systems)"
    )
    parser.add_argument(
        "--memory-waiting",
        type=int,
        default=MEMORY_BOUND_WAITING,
        help="waiting requests in the memory-bound state, 0 leaves it out (default: %(default)s)",
    )
    parser.add_argument("--group", type=_count, default=GROUP, help="systems per group (default: %(default)s)")
    parser.add_argument("--blocks", type=_count, help="blocks of 5 steps per system and cell (default: 90; quick: 16)")
    args = parser.parse_args(argv)
    args.systems = args.systems.split(",") if args.systems else default_systems(args.quick)
    args.running = args.running or ([8, 256] if args.quick else [8, 64, 256])
    args.blocks = args.blocks or (16 if args.quick else 90)
    if args.quick and args.waiting is None:
        args.waiting = [0, 1000]
    try:
        for name in args.systems:
            if systems.resolve(subject.split(name)[0]).oracle:
                raise ConfigError("--systems", name, "a system that may serve: oracles are for offline benchmarks")
    except ValueError as error:
        parser.error(f"--systems: {error}")
    if min([*(args.waiting or [0]), args.memory_waiting]) < 0:
        parser.error("--waiting and --memory-waiting: must be 0 or more")
    return args


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value


def main(argv: Sequence[str]) -> None:
    """Measure, print, write."""
    args = parse(argv)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    steps_per_block = 5
    timer = time.perf_counter if args.wall else time.thread_time
    measured: list[dict[Cell, dict[str, Subject]]] = []
    members = groups(args.systems, args.group)
    started = time.monotonic()
    for group in members:
        measured.append({})
        for cell in cells(group, args):
            found_here = measure(group, cell, args.blocks, steps_per_block, keep_gc=args.gc, timer=timer)
            measured[-1][cell] = found_here
        elapsed = time.monotonic() - started
        print(f"{elapsed:6.0f} s: measured {', '.join(group)}", file=sys.stderr, flush=True)
    found, beside, rows = report.summarise(measured, args.seed)
    every_cell = [cell for group in measured for cell in group]
    config = {
        "groups": [list(group) for group in members],
        "running": args.running,
        "waiting": sorted({cell.waiting for cell in every_cell if not cell.memory_bound}),
        "waiting_memory_bound": args.memory_waiting,
        "blocks": args.blocks,
        "steps_per_block": steps_per_block,
        "depth": 2,
        "prefix_caching": True,
        "log_stats": True,
        "gc_while_timed": args.gc,
        "timer": timer.__name__,
        "step_s_virtual": subject.STEP_S,
        "model_step_s": report.MODEL_STEP_S,
        "waiting_spread_s": subject.AGE_LIMIT_S,
        "prompt_tokens": [subject.PROMPT_TOKENS, subject.PROMPT_TOKENS + subject.BLOCK - 1],
        "prompt_tokens_waiting_memory_bound": subject.LONG_PROMPT_TOKENS,
        "predicted_tokens": subject.PREDICTED_TOKENS,
        "finished_lengths": subject.FINISHED_LENGTHS,
        "ttft_slo_ms": subject.TTFT_SLO_MS,
        "tbt_slo_ms": list(subject.TBT_SLO_MS),
    }
    total = max(cell.running + cell.waiting for cell in every_cell)
    shape = f"{subject.PROMPT_TOKENS} {subject.PREDICTED_TOKENS} {subject.MAX_TOKENS} {total}"
    result = Result(
        name="step_overhead",
        command=command(argv, __file__),
        config=config,
        seed=args.seed,
        workload=Workload(name="steady-decode", rows=total, sha256=hashlib.sha256(shape.encode()).hexdigest()),
        metrics={f"{name}_{key}": value for name, values in found.items() for key, value in values.items()},
        baselines={BASELINE: {f"{n}_{key}": value for n, values in beside.items() for key, value in values.items()}},
        claims=report.claims(found, beside, every_cell, max(args.running)),
    )
    emit(result, [Table(list(report.HEADER), rows)], args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
