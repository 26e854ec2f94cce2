"""What benchmarks of a CUDA device share: their command line, and the device's clock. A part of those."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - before all that it makes importable
import numpy as np
import torch
from turns import Key, Seconds

from vllm_ext.files import replaced
from vllm_ext.report import results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that every benchmark of a GPU has."""
    results.add_arguments(parser)
    parser.add_argument("--dry", action="store_true", help="a try on the CPU, whose numbers mean nothing")


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; without a device, and without ``--dry``, the process ends with `NEEDS_DEVICE`."""
    args = parser.parse_args(argv)
    if not args.dry and not torch.cuda.is_available():
        parser.exit(
            results.NEEDS_DEVICE,
            "needs a CUDA device; --dry tries it without one (kernels of Triton with TRITON_INTERPRET=1)\n",
        )
    return args


def parse(description: str | None, argv: Sequence[str]) -> argparse.Namespace:
    """Read a command line without options of its own; see `parsed`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    return parsed(parser, argv)


def write(out: Path | None, found: Mapping[str, Any]) -> None:
    """Write what was found so far, in one move: the process may be ended at any time."""
    if out is not None:
        with replaced(out) as file:
            file.write(json.dumps(found, indent=1, allow_nan=False).encode())


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


def captured(calls: Sequence[Callable[[], object]], device: str) -> Callable[[], object]:
    """Return what makes all calls: on ``cuda`` a graph, whose kernels follow each other without the host."""
    if device != "cuda":
        return lambda: [call() for call in calls]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()  # compiled, and what it allocates is there
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def measure(
    subjects: Mapping[Key, Callable[[], object]], repeats: int, device: str, skipped: int
) -> dict[Key, Seconds]:
    """Return seconds of each subject by turns, behind some turns that do not count."""
    turns = [{name: seconds(subject, device) for name, subject in subjects.items()} for _ in range(repeats + skipped)]
    return {name: np.array([turn[name] for turn in turns[skipped:]]) for name in subjects}
