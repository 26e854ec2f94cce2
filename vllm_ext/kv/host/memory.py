"""How much memory this process may still take: what the machine has left, and what its container does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_ROOT, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_SPARE_SHARE = 0.3
"""Of what is free, where nobody said how much the tier may take: weights are still to be loaded through host memory."""
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_bytes(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int:
    """Return the bytes that are left: the least of the machine's and of every control group's that holds this process.

    Args:
        root: Where control groups are mounted, of version 1 or 2.
        membership: Says which of them hold this process.
    """
    of_machine: int = psutil.virtual_memory().available
    return min([of_machine, *_left_in_groups(root, membership)])


def spare_bytes(replicas: int) -> int:
    """Return the bytes that each of so many engines on this machine may take where nobody said how many."""
    return int(_SPARE_SHARE * free_bytes() / max(1, replicas))


def _left_in_groups(root: Path, membership: Path) -> Iterator[int]:
    """Yield what is left in each group that says it."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and "memory" not in controllers.split(","):
            continue
        top, names = (root / "memory", _V1) if controllers else (root, _V2)
        group = Path(path.lstrip("/"))
        for inner in (group, *group.parents):  # in a container the outer ones may not be seen
            if (left := _left(top / inner, *names)) is not None:
                yield left


def _left(group: Path, limit: str, usage: str, cache: str) -> int | None:
    """Return a group's limit less what it can't give back; None if it has none, or is not there."""
    try:
        most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return None if most == "max" else max(0, int(most) - used + int(counts.get(cache, 0)))
    except (OSError, ValueError):
        return None
