"""What benchmarks of a CUDA device share: their command line, and the device's clock. A part of those."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence

import checkout  # noqa: F401 - before all that it makes importable
import numpy as np
import torch
from turns import Key, Seconds

from vllm_ext.observability.results import NEEDS_DEVICE, add_arguments


def parse(description: str | None, argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; without a device, and without ``--dry``, the process ends with `NEEDS_DEVICE`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--dry", action="store_true", help="a try on the CPU, whose numbers mean nothing")
    args = parser.parse_args(argv)
    if not args.dry and not torch.cuda.is_available():
        parser.exit(NEEDS_DEVICE, "needs a CUDA device; --dry tries the script without one, with TRITON_INTERPRET=1\n")
    return args


def seconds(work: Callable[[], object], device: str) -> float:
    """Return the time of one call, by the events of ``cuda``, or by the clock of any other device."""
    if device != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def measure(
    subjects: Mapping[Key, Callable[[], object]], repeats: int, device: str, skipped: int
) -> dict[Key, Seconds]:
    """Return seconds of each subject by turns, behind some turns that do not count."""
    turns = [{name: seconds(subject, device) for name, subject in subjects.items()} for _ in range(repeats + skipped)]
    return {name: np.array([turn[name] for turn in turns[skipped:]]) for name in subjects}
