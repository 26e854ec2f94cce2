"""Where copies of KV cost time: in the workers that make them, and in the engine that waits for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(slots=True)
class WorkerTimes:
    """Seconds of one worker, or the sum over several."""

    store_wait_s: float = 0.0
    """The step stood still while stores were begun, and waited for if it writes into their blocks."""
    load_wait_s: float = 0.0
    """The step stood still while loads were begun, and waited for where they are for the step itself."""
    store_codec_s: float = 0.0
    """Chunks were written. With 8 bits that is quantisation: on the CPU, quantising and copying are one pass."""
    load_codec_s: float = 0.0
    """Blocks were written from chunks; with 8 bits, dequantisation."""

    def add(self, more: WorkerTimes) -> None:
        """Take over others."""
        self.store_wait_s += more.store_wait_s
        self.load_wait_s += more.load_wait_s
        self.store_codec_s += more.store_codec_s
        self.load_codec_s += more.load_codec_s


@runtime_checkable
class Timed(Protocol):
    """A worker that knows what its codec took."""

    def take_times(self) -> WorkerTimes:
        """Return what copying took since the last time."""
        ...


class LoadStall:
    """How long an engine had requests, and could do nothing but wait until their KV was loaded.

    Loads go on between steps, while others compute. Where there are no others, the engine makes empty steps: the time
    from one to the next counts, unless an earlier step still computes.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: float | None = None
        self._computing = 0

    @property
    def is_open(self) -> bool:
        """Whether the engine stands still."""
        return self._since is not None

    def scheduled(self, num_tokens: int, is_loading: bool, now: float) -> None:
        """Note a step.

        Args:
            num_tokens: What it computes.
            is_loading: Whether loads are under way.
            now: Clock time, s.
        """
        self.end(now)
        if num_tokens:
            self._computing += 1
        elif is_loading and not self._computing:
            self._since = now

    def finished(self, num_tokens: int) -> None:
        """Note that the output of a step of so many tokens arrived."""
        self._computing -= num_tokens > 0

    def end(self, now: float) -> None:
        """Note that nobody waits any more, or only as the next step says."""
        if self._since is not None:
            self.seconds += now - self._since
            self._since = None
