"""Which blocks of a prompt are reused where they are, which are brought back, and which are computed again.

A conversation that comes back may have lost KV anywhere: its leading end (Pensieve, section 4.3.1, drops that first),
or pieces in the middle. Block hashes cover the whole prefix, so a block that is found is right whatever lies before it,
and what is missing can be computed in one forward pass beside the new prompt (Pensieve, section 4.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby


class Action(Enum):
    """What is done about a block, by where its KV is."""

    REUSE = "reuse"
    """It is on the device, also in a record of 8 bits."""
    LOAD = "load"
    """In host memory."""
    COMPUTE = "compute"
    """Nowhere, or it would make one gap too many."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Neighbouring blocks about which the same is done."""

    action: Action
    start: int
    """First block."""
    end: int
    """Block behind the last one."""

    @property
    def num_blocks(self) -> int:
        """How many blocks."""
        return self.end - self.start


def plan(blocks: Sequence[Action], *, max_gaps: int) -> tuple[Run, ...]:
    """Return what is done about the blocks of a prompt: all that is kept is used, as Pensieve has it.

    A gap is a run of computed blocks before kept ones. Where there are more than are allowed, the shortest stretches of
    kept blocks are computed again with the gaps around them. Runs of blocks that are kept and stand at the sequence's
    start have no gap before them.

    Args:
        blocks: What can be done about the prompt's whole blocks, in order, without that of its last token, which must
            be computed.
        max_gaps: Gaps that may be left; 0: a plain prefix hit.

    Returns:
        Runs from the first block to the last one that is kept; neighbours differ in what is done.

    Raises:
        ValueError: ``max_gaps`` is negative.
    """
    if max_gaps < 0:
        raise ValueError(f"max_gaps={max_gaps!r}: must be 0 or more")
    numbers = range(len(blocks))
    stretches = [list(part) for kept, part in groupby(numbers, lambda n: blocks[n] is not Action.COMPUTE) if kept]
    behind_gaps = [stretch for stretch in stretches if stretch[0]]
    longest = sorted(behind_gaps, key=len, reverse=True)[:max_gaps]
    used = {number for stretch in stretches if not stretch[0] or stretch in longest for number in stretch}
    end = max(used, default=-1) + 1
    actions = [blocks[number] if number in used else Action.COMPUTE for number in range(end)]
    runs, start = [], 0
    for action, part in groupby(actions):
        length = len(list(part))
        runs.append(Run(action=action, start=start, end=start + length))
        start += length
    return tuple(runs)


def gaps_of(runs: Sequence[Run]) -> int:
    """Return how many gaps a plan has, which ends with a kept block."""
    return sum(run.action is Action.COMPUTE for run in runs)
