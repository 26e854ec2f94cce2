"""How far a long computation is, on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO, final

QUIET_S = 30.0
"""Wall-clock time between two lines where stderr is no terminal, in seconds."""


@final
class BarProgress:
    """A bar with the time that is left. A context manager: the bar ends with the block.

    Where the stream is no terminal, or tqdm is missing, it prints a line every 30 s instead, so that short runs print
    nothing and logs stay readable.
    """

    def __init__(
        self,
        *,
        total_requests: int | None = None,
        total_time_s: float | None = None,
        label: str = "",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start.

        Args:
            total_requests: How many will end; None if not known.
            total_time_s: Virtual time at which the run ends, in seconds; goes before ``total_requests``.
            label: In front of the bar.
            stream: Where to print; stderr if left out.
            clock: Wall-clock seconds, for the lines.

        Raises:
            ValueError: a total is not greater than 0.
        """
        for name, total in (("total_requests", total_requests), ("total_time_s", total_time_s)):
            if total is not None and not total > 0:
                raise ValueError(f"{name}={total!r}: must be greater than 0, or left out")
        self._by_time = total_time_s is not None
        self._total: float | None = total_time_s if total_time_s is not None else total_requests
        self._label = label or "simulation"
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._started_s = self._told_s = clock()
        self._bar = self._open_bar() if self._stream.isatty() else None

    def __enter__(self) -> BarProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, now_s: float, finished: int) -> None:
        """Note the virtual time in seconds and how many requests have ended."""
        done = now_s if self._by_time else finished
        if self._bar is not None:
            if self._by_time:
                done = min(done, self._bar.total)  # the last step may end after the limit
            self._bar.update(done - self._bar.n)
            return
        wall_s = self._clock()
        if wall_s - self._told_s >= QUIET_S:
            self._told_s = wall_s
            print(self._line(now_s, finished, wall_s - self._started_s), file=self._stream, flush=True)

    def close(self) -> None:
        """End the bar; may be called twice."""
        if self._bar is not None:
            self._bar.close()

    def _line(self, now_s: float, finished: int, elapsed_s: float) -> str:
        done = now_s if self._by_time else finished
        parts = [f"{finished} requests ended", f"{now_s:.1f} s simulated", f"{_duration(elapsed_s)} elapsed"]
        if self._total is not None and done > 0:
            fraction = min(done / self._total, 1.0)
            parts[:0] = [f"{fraction:.1%}"]
            parts.append(f"{_duration(elapsed_s * (1 - fraction) / fraction)} left")
        return f"{self._label}: {', '.join(parts)}"

    def _open_bar(self) -> Any:
        try:
            from tqdm import tqdm
        except ImportError:
            return None
        width = "{n:.1f}/{total:.1f} s simulated" if self._by_time else "{n_fmt}/{total_fmt} requests"
        return tqdm(
            total=self._total,
            desc=self._label,
            file=self._stream,
            unit="s" if self._by_time else "request",
            bar_format="{desc}: {percentage:3.0f}%|{bar}| " + width + " [{elapsed}, {remaining} left]"
            if self._total is not None
            else "{desc}: {n_fmt} requests [{elapsed}, {rate_fmt}]",
            dynamic_ncols=True,
        )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
