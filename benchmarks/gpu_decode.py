"""What does a step of decode take with our scheduler, and with a host tier, beside vLLM's own?

Llama-3.1-8B's shape with random weights and full graphs of decode, an engine for each setting: batches of 1, 32 and 128
are prefilled, and then their steps are timed in runs of 20, host and device together, as a client sees them. The first
setting is run again at the end, unless `--quick`: two engines that are the same differ by so much.

    python benchmarks/gpu_decode.py --out decode_steps.json
    python benchmarks/gpu_decode.py --dry              # on the CPU
"""

from __future__ import annotations

import argparse
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


def timed(setting: str, *, dry: bool) -> dict[str, Any]:
    """Return milliseconds of a step for each cell, run by run."""
    engine = gpu_engine.Engine(setting, "llama-8b", dry=dry, max_num_batched_tokens=128 if dry else 8192)
    found: dict[str, Any] = {"start_s": engine.start_s, "scheduler": type(engine.scheduler).__name__}
    runs, steps = (1, 4) if dry else (_RUNS, _STEPS)
    for batch, context in _DRY_CELLS if dry else CELLS:
        ids = [engine.add(engine.prompt(number, context), 2 * _SKIPPED + runs * steps) for number in range(batch)]
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
        found[f"batch_{batch}_context_{context}_ms"] = taken
        engine.finish()
    engine.close()
    return found


def main(argv: Sequence[str]) -> int:
    """Time all settings, and return 0 if all ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu.add_arguments(parser)
    gpu_engine.add_settings(parser, SETTINGS, limit_s=60.0)
    args = on_gpu.parsed(parser, argv)
    if args.one:
        on_gpu.write(args.out, timed(args.one, dry=args.dry))
        return 0
    found: dict[str, Any] = {}
    first = args.settings.split(",")[0]
    if not args.quick:
        args.settings += f",{first}"
    for setting, one in gpu_engine.in_processes(__file__, args):
        name = f"{setting}, again" if setting in found else setting
        found[name] = one
        for cell in [cell for cell in one if cell.endswith("_ms")]:
            middle = statistics.median(one[cell])
            ratio = one[f"{cell.removesuffix('_ms')}_over_{first}"] = middle / statistics.median(found[first][cell])
            print(f"{name:13} {cell:30} {middle:8.2f}, {ratio:.3f} times {first}", file=sys.stderr, flush=True)
        on_gpu.write(args.out, found)
    return int(any(one["problems"] for one in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
