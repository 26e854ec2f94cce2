"""How far a job is whose parts can be counted, on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO, final

QUIET_S = 30.0
"""Wall-clock time between two lines where stderr is no terminal, in seconds."""


@final
class CountProgress:
    """A bar with the time that is left. A context manager: the bar ends with the block.

    Where the stream is no terminal, or tqdm is missing, it prints a line every 30 s instead, so that short runs print
    nothing and logs stay readable.
    """

    def __init__(
        self,
        total: int | None,
        *,
        label: str,
        unit: str,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start.

        Args:
            total: Parts there are, as far as is known, at least 1; None: not known.
            label: What is done, in front of the bar.
            unit: What a part is called, in the singular.
            quiet: Print nothing at all.
            stream: Where to print; stderr if left out.
            clock: Wall-clock seconds, for the lines.

        Raises:
            ValueError: ``total`` is below 1.
        """
        if total is not None and total < 1:
            raise ValueError(f"total={total!r}: must be at least 1")
        self._total, self._label, self._unit, self._quiet = total, label, unit, quiet
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._started_s = self._told_s = clock()
        self._bar = self._open_bar() if not quiet and self._stream.isatty() else None

    def __enter__(self) -> CountProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, done: int, note: str = "", *, total: int | None = None) -> None:
        """Note how many parts are done in all, something to print beside them, and how many there turn out to be."""
        total = total or self._total
        self._total = None if total is None else max(total, done)
        if self._bar is not None:
            self._bar.total = self._total
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(done - self._bar.n)
            return
        now_s = self._clock()
        if self._quiet or done < 1 or now_s - self._told_s < QUIET_S:
            return
        self._told_s = now_s
        elapsed_s = now_s - self._started_s
        parts = [f"{done} {self._unit}s", *([note] if note else []), f"{elapsed_s:.0f} s elapsed"]
        if self._total is not None:
            parts[0] = f"{done} of {self._total} {self._unit}s"
            parts[-1] = f"at most {elapsed_s * (self._total - done) / done:.0f} s left"
        print(f"{self._label}: {', '.join(parts)}", file=self._stream, flush=True)

    def _open_bar(self) -> Any:
        try:
            from tqdm import tqdm
        except ImportError:
            return None
        return tqdm(total=self._total, desc=self._label, unit=self._unit, file=self._stream, dynamic_ncols=True)
