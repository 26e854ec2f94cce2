"""What does a step of decode take with our scheduler, and with a host tier, beside vLLM's own?

Llama-3.1-8B's shape with random weights and full graphs of decode, an engine for each setting: batches of 1, 32 and 128
are prefilled, and then their steps are timed in runs of 20, host and device together, as a client sees them. The first
setting is run again at the end, unless `--quick`: two engines that are the same differ by so much. A batch of which a
request ended within the timed steps is a problem, and no time.

    python benchmarks/gpu/gpu_decode.py --out decode_steps.json
    python benchmarks/gpu/gpu_decode.py --dry              # on the CPU
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import gpu_engine
import on_gpu

SETTINGS = ("stock", "alise", "alise-tier")
CELLS = ((1, 512), (32, 2048), (128, 1024))
"""Requests, and tokens of each context."""
_DRY_CELLS = ((1, 32), (4, 32))
_RUNS, _STEPS, _SKIPPED = 3, 20, 6
_BUDGET, _DRY_BUDGET = 8192, 128
"""Tokens of a step."""
_SLACK = 8
"""Steps by which outputs are longer than those that are counted: a step may be under way when another is planned."""


def output_tokens(batch: int, context: int, budget: int, steps: int) -> int:
    """Return the tokens of an output that outlasts the prefill of the whole batch and so many steps behind it.

    The first of the batch decodes beside the prompts of all others, and takes a part of their budget.
    """
    return math.ceil(batch * context / (budget - batch)) + _SKIPPED + steps + _SLACK


def batch_ms(engine: gpu_engine.Engine, batch: int, context: int, budget: int, runs: int, steps: int) -> list[float]:
    """Return milliseconds of a step of a batch, of each run; none if a request ended within them."""
    output = output_tokens(batch, context, budget, runs * steps)
    ids = [engine.add(engine.prompt(number, context), output) for number in range(batch)]
    while not all(engine.seen[req_id].token_times_s for req_id in ids):
        engine.step()
    for _ in range(_SKIPPED):
        engine.step()
    taken = []
    for _ in range(runs):
        began = engine.now()
        for _ in range(steps):
            engine.step()
        taken.append((engine.now() - began) / steps * 1e3)
    all_ran = not any(engine.seen[req_id].ended for req_id in ids)
    engine.abort_all()
    return taken if all_ran else []


def timed(setting: str, report: on_gpu.Report, *, dry: bool) -> None:
    """Report milliseconds of a step for each cell, run by run."""
    budget = _DRY_BUDGET if dry else _BUDGET
    engine = gpu_engine.Engine(setting, "llama-8b", dry=dry, max_num_batched_tokens=budget)
    report.found |= {
        "start_s": engine.start_s, "scheduler": type(engine.scheduler).__name__,
        "cudagraph_mode": engine.cudagraph_mode, "problems": [],
    }  # fmt: skip
    for batch, context in _DRY_CELLS if dry else CELLS:
        name, runs = f"batch_{batch}_context_{context}", (1, 4) if dry else (_RUNS, _STEPS)
        if taken := batch_ms(engine, batch, context, budget, *runs):
            report.found[f"{name}_ms"] = taken
        else:
            report.found["problems"].append(f"{name}: a request ended within the timed steps")
        report.write()
    engine.close()


def compare(name: str, one: dict[str, Any], first: dict[str, Any], first_name: str) -> None:
    """Add the ratios of an engine's medians to those of the first, as far as both have them."""
    for cell in [cell for cell in one if cell.endswith("_ms") and cell in first]:
        middle = statistics.median(one[cell])
        ratio = one[f"{cell.removesuffix('_ms')}_over_{first_name}"] = middle / statistics.median(first[cell])
        print(f"{name:13} {cell:30} {middle:8.2f}, {ratio:.3f} times {first_name}", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Time all settings, and return 0 if all ran, else 3."""
    args = gpu_engine.parse(__doc__, argv, SETTINGS)
    report = on_gpu.Report(args.out, dry=args.dry)
    if args.one:
        timed(args.one, report, dry=args.dry)
        return report.end()
    first = args.settings[0]
    if not args.quick:
        args.settings.append(first)
    for name, one in gpu_engine.in_processes(__file__, args, report):
        compare(name, one, report.found["settings"][first], first)
    return report.end(complete=gpu_engine.all_complete(report))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
