"""What a worker of the tier could not do."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable


class Failures(NamedTuple):
    """What went wrong since the last time it was asked for."""

    chunks: set[int]
    """Chunks that hold nothing that may be read."""
    blocks: set[int]
    """Blocks of the device that a load did not fill."""
    load_jobs: set[int]
    """Loads that did not fill all of their blocks."""

    @classmethod
    def none(cls) -> Failures:
        """Return an account of no failure."""
        return cls(set(), set(), set())

    def add(self, more: Failures) -> None:
        """Take over others."""
        for known, new in zip(self, more, strict=True):
            known.update(new)


@runtime_checkable
class Fallible(Protocol):
    """A worker whose copies may fail."""

    def take_failures(self) -> Failures:
        """Return what failed since the last time; call it after `get_finished`, so that none is reported too late."""
        ...
