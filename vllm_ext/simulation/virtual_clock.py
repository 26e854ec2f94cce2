"""Time that passes only when told to."""

from __future__ import annotations


class VirtualClock:
    """A clock to hand to schedulers and simulators: call it for the time in seconds.

    Args:
        start_s: The first reading.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def __call__(self) -> float:
        """Return the time, in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            ValueError: ``seconds`` is negative; the clock never goes back.
        """
        if not seconds >= 0:
            raise ValueError(f"seconds={seconds!r}: must be 0 or more, a clock never goes back")
        self._now_s += seconds

    def advance_to(self, moment_s: float) -> None:
        """Let time pass until ``moment_s``, exactly.

        Raises:
            ValueError: that moment is past; the clock never goes back.
        """
        if not moment_s >= self._now_s:
            raise ValueError(f"moment_s={moment_s!r}: it is {self._now_s} s already, a clock never goes back")
        self._now_s = moment_s
