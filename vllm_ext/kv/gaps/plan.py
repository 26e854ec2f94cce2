"""Which blocks of a prompt are reused where they are, which are brought back, and which are computed again.

A conversation that comes back may have lost KV anywhere: its leading end (Pensieve, section 4.3.1, drops that first),
or pieces in the middle. Block hashes cover the whole prefix, so a block that is found is right whatever lies before it,
and what is missing can be computed in one forward pass beside the new prompt (Pensieve, section 4.4).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby


class Place(Enum):
    """Where a block's KV is."""

    DEVICE = "device"
    DEVICE_INT8 = "device-int8"
    """In a record of 8 bits."""
    HOST = "host"
    NOWHERE = "nowhere"


class Action(Enum):
    """What is done about a block."""

    REUSE = "reuse"
    LOAD = "load"
    COMPUTE = "compute"


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


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds that the parts of a plan take.

    Raises:
        ValueError: a time is negative.
    """

    compute_s: Callable[[int, int], float]
    """Of computing so many tokens after so many others; must grow with the latter, as attention does."""
    load_s_per_block: float
    """Of bringing one block back from the host."""
    load_s: float = 0.0
    """Of each run of blocks that is brought back, in addition."""
    int8_s_per_block: float = 0.0
    """Of reading a block in a record, beyond one in a block."""
    gap_s: float = 0.0
    """Of each gap, in addition: computed blocks before others that are reused or loaded."""

    def __post_init__(self) -> None:
        for field in ("load_s_per_block", "load_s", "int8_s_per_block", "gap_s"):
            value = getattr(self, field)
            if not value >= 0:
                raise ValueError(f"{field}={value!r}: must be 0 or more seconds")

    def block_s(self, place: Place) -> float:
        """Return the seconds of using one block that is kept somewhere."""
        return {Place.HOST: self.load_s_per_block, Place.DEVICE_INT8: self.int8_s_per_block}.get(place, 0.0)


@dataclass(frozen=True, kw_only=True)
class GapPlan:
    """What is done about the blocks of a prompt, from its first on; what is behind them is computed."""

    runs: tuple[Run, ...]
    """Without gaps between them; two neighbours differ in what is done."""
    cost_s: float

    @property
    def gaps(self) -> tuple[Run, ...]:
        """Computed runs that reused or loaded ones follow, so that a request's queries are not one contiguous range."""
        return tuple(run for run, _ in zip(self.runs, self.runs[1:], strict=False) if run.action is Action.COMPUTE)

    def num_blocks(self, action: Action) -> int:
        """How many blocks this is done about."""
        return sum(run.num_blocks for run in self.runs if run.action is action)


def plan(places: Sequence[Place], block_size: int, costs: Costs, *, max_gaps: int) -> GapPlan:
    """Return the cheapest plan.

    Computed blocks at the end are no gap: what follows them is computed too. Cost: a few operations per change of place
    and allowed gap, and a bisection for each stretch on the host; of hundreds of blocks, that is some tens of steps.

    Args:
        places: Of the prompt's whole blocks in order, without the one of its last token, which must be computed.
        block_size: Tokens of a block.
        costs: Of the parts.
        max_gaps: Gaps that may be left; 0: a plain prefix hit.

    Raises:
        ValueError: ``block_size`` or ``max_gaps`` is out of its range.
    """
    if block_size < 1:
        raise ValueError(f"block_size={block_size!r}: must be at least 1")
    if max_gaps < 0:
        raise ValueError(f"max_gaps={max_gaps!r}: must be 0 or more")
    # By last action and gaps so far: cost and runs of the cheapest way through the blocks seen.
    best: dict[tuple[Action | None, int], GapPlan] = {(None, 0): GapPlan(runs=(), cost_s=0.0)}
    start = 0
    for place, members in groupby(places):
        end = start + len(list(members))
        following: dict[tuple[Action | None, int], GapPlan] = {}
        for (last, gaps), found in best.items():
            for option in _options(place, start, end, block_size, costs):
                state, grown = _append(last, gaps, found, option, block_size, costs)
                if place is Place.DEVICE_INT8 and option[-1].action is Action.REUSE:
                    grown = replace(grown, cost_s=grown.cost_s + option[-1].num_blocks * costs.int8_s_per_block)
                if state[1] <= max_gaps and (state not in following or grown.cost_s < following[state].cost_s):
                    following[state] = grown
        best, start = following, end
    return min(best.values(), key=lambda found: found.cost_s)


def _options(place: Place, start: int, end: int, block_size: int, costs: Costs) -> Iterable[tuple[Run, ...]]:
    """Yield what may be done about blocks of one place: all in one way, or those behind the first ones in the other."""
    yield (Run(action=Action.COMPUTE, start=start, end=end),)
    if place is Place.NOWHERE:
        return
    action = Action.LOAD if place is Place.HOST else Action.REUSE
    yield (Run(action=action, start=start, end=end),)
    # A block takes longer to compute the more lies before it: from some block on, what is kept is quicker.
    block_s = costs.block_s(place)
    cut = bisect_left(range(start, end), True, key=lambda i: costs.compute_s(block_size, i * block_size) > block_s)
    if 0 < cut < end - start:
        middle = start + cut
        yield (Run(action=Action.COMPUTE, start=start, end=middle), Run(action=action, start=middle, end=end))


def _append(
    last: Action | None, gaps: int, found: GapPlan, option: tuple[Run, ...], block_size: int, costs: Costs
) -> tuple[tuple[Action | None, int], GapPlan]:
    runs, cost_s = list(found.runs), found.cost_s
    for run in option:
        if run.action is Action.COMPUTE:
            cost_s += costs.compute_s(run.num_blocks * block_size, run.start * block_size)
        else:
            if last is Action.COMPUTE:
                gaps += 1
                cost_s += costs.gap_s
            if run.action is Action.LOAD:
                cost_s += run.num_blocks * costs.load_s_per_block + (costs.load_s if last is not Action.LOAD else 0.0)
        if runs and runs[-1].action is run.action:
            runs[-1] = Run(action=run.action, start=runs[-1].start, end=run.end)
        else:
            runs.append(run)
        last = run.action
    return (last, gaps), GapPlan(runs=tuple(runs), cost_s=cost_s)
