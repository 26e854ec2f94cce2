"""What one request waited for; `wait_reasons` fills it in."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class WaitRecord:
    """What one request waited for, over all its waits."""

    queued: int
    """How many waited when it came."""
    ahead: int | None
    """Of these, how many ranked before it."""
    adapter: int
    lacked: dict[str, int] = field(default_factory=dict)
    """Steps in which the best of those who were looked at did not fit, by reason."""
    lacked_before: dict[str, int] = field(default_factory=dict)
    """As counted when the wait began."""
    since: int | None = None
    """Step after which it waits; None: it does not."""
    placeless: int = 0
    """Steps in which its adapter had no place, as counted when the wait began."""
    steps: int = 0
    """In which it was left behind."""
    passed_by: int | None = None
    refused: dict[str, int] = field(default_factory=dict)
    """Steps in which it was looked at and refused, by reason."""
    preempted: dict[str, int] = field(default_factory=dict)
    """By reason."""
