"""Subjects that are timed by turns, so that noise of the machine meets all alike, and that compute the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

Key = TypeVar("Key", bound=Hashable)
Seconds = np.ndarray[Any, np.dtype[np.float64]]
Work = Callable[[], object]
_ALLOWED_ERROR = 0.02
"""Of attention, relative to the norm of its output; bfloat16 has steps of 0.4 % in each probability."""


def measure(
    subjects: Mapping[Key, Work], repeats: int, timer: Callable[[], float] = time.perf_counter, *, device: str = "cpu",
    skipped: int = 0,
) -> dict[Key, Seconds]:  # fmt: skip
    """Return seconds of each subject, by turns.

    Args:
        subjects: What is timed.
        repeats: Turns.
        timer: A clock, in seconds; not used on ``cuda``.
        device: ``cuda`` is timed by its own events.
        skipped: Turns before that do not count.
    """
    turns = [
        {name: seconds(subject, timer, device) for name, subject in subjects.items()} for _ in range(repeats + skipped)
    ]
    return {name: np.array([turn[name] for turn in turns[skipped:]]) for name in subjects}


def seconds(work: Work, timer: Callable[[], float] = time.perf_counter, device: str = "cpu") -> float:
    """Return the time of one call; the arguments are those of `measure`."""
    if device != "cuda":
        started = timer()
        work()
        return timer() - started
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def captured(calls: Sequence[Work], device: str) -> Work:
    """Return what makes all calls: on ``cuda`` a graph, whose kernels follow each other without the host."""
    if device != "cuda":
        return lambda: [call() for call in calls]
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()  # compiled, and what it allocates is there
    torch.cuda.current_stream().wait_stream(stream)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def replay(_held: Sequence[Work] = tuple(calls)) -> None:  # a graph does not hold the memory that its kernels read
        graph.replay()

    return replay


def ratio(times: Mapping[Key, Seconds], one: Key, other: Key) -> tuple[float, float, float]:
    """Return the median of one subject's time over that of the other in the same turn, and its quartiles."""
    middle, low, high = np.percentile(times[one] / times[other], [50, 25, 75])
    return float(middle), float(low), float(high)


def largest_copy(mib: float, repeats: int, timer: Callable[[], float] = time.thread_time) -> float:
    """Return GB/s of one copy of so many MiB from end to end, memory's limit for one thread."""
    source = np.ones(int(mib * 2**20), np.uint8)
    target = np.zeros_like(source)
    found = measure({"copy": lambda: np.copyto(target, source)}, repeats, timer)["copy"]
    return round(source.size / float(np.median(found)) / 1e9, 3)


def check_output(name: str, found: Any, expected: Any) -> None:
    """Raise RuntimeError if what attention gives, a tensor, is not what it must be."""
    error = float((found.to(expected.dtype) - expected).norm() / expected.norm())
    if not error <= _ALLOWED_ERROR:
        raise RuntimeError(f"{name}: the output is off by {error:.3g} of its norm, allowed are {_ALLOWED_ERROR}")
