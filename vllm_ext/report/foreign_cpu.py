"""Cores kept busy by processes that are not ours: the noise that a shared machine adds to every latency."""

from __future__ import annotations

import contextlib
import time


class ForeignCpu:
    """Counts from when it is made. What this process starts, and what that starts, is ours for as long as it lives."""

    def __init__(self) -> None:
        self._start = self._read()

    def cores(self) -> float:
        """Return the mean number of cores that others kept busy since then."""
        wall, busy, own = (now - before for before, now in zip(self._start, self._read(), strict=True))
        return max(0.0, (busy - own) / wall)

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """Seconds: the clock's, those of all cores that were not idle, those of our processes."""
        import psutil  # type: ignore[import-untyped]  # comes with vLLM

        own, this = 0.0, psutil.Process()
        for process in [this, *this.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                own += times.user + times.system
        times = psutil.cpu_times()
        busy = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
        return time.monotonic(), busy, own
