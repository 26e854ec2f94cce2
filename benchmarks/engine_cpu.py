"""What other processes do to the machine while `engine_cell.py` measures.

A part of engine_compare.py: it is run from there.
"""

from __future__ import annotations

import os
import time
from pathlib import Path


class CpuClock:
    """Cores kept busy by processes that are not ours: the noise a small machine adds to every latency (Linux only)."""

    def __init__(self) -> None:
        self._start = self._read()

    def foreign_cores(self) -> float | None:
        """Mean number of cores used since construction by others than this session; None where it is not known."""
        if self._start is None or (now := self._read()) is None:
            return None
        wall, busy, own = (b - a for a, b in zip(self._start, now, strict=True))
        return max(0.0, (busy - own) / wall)

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Seconds: wall clock, processor time of the whole machine, processor time of this session's processes."""
        proc = Path("/proc")
        try:
            user, nice, system, _, _, irq, softirq, steal = map(int, proc.joinpath("stat").read_text().split()[1:9])
        except (OSError, ValueError):
            return None
        session, own = os.getsid(0), 0
        for stat in proc.glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            if int(fields[3]) == session:
                own += sum(map(int, fields[11:15]))  # user and system time, its own and that of children it waited for
        ticks = os.sysconf("SC_CLK_TCK")
        return time.monotonic(), (user + nice + system + irq + softirq + steal) / ticks, own / ticks
