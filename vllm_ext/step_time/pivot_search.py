"""Search for the pivot forward size: the smallest step, in tokens, whose throughput nearly is the best.

Source: AccelGen, sections 3.1 and 4.2 (S_pf and its time T_pf): throughput improves with the forward size and nearly
saturates there. Which share counts as nearly, and the search, are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from vllm_ext.step_time.runtime import Pivot

SHARE = 0.95
"""Of the best throughput measured, that counts as saturated."""
_SMALLEST = 16
_REFINEMENTS = 3
_PROMPT_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class PivotFound:
    """What a search found."""

    pivot: Pivot
    saturated: bool
    """False: half the largest step does not come near the best throughput, so that larger steps may have more."""
    times: dict[int, float]
    """Seconds of each step measured, by its tokens, ascending. None takes longer than a larger one did."""


def search(measure: Callable[[int], float | None], largest: int) -> PivotFound | None:
    """Measure steps that double in size up to the largest, then some between the last two that differ in the answer.

    Where half the largest step does not reach the share, throughput still rises: the largest step is the answer then,
    and marked as not saturated. A step that took longer than a larger one was disturbed, and counts as that one.

    Args:
        measure: Returns the duration in seconds of a step of so many tokens; None if the engine takes no such step,
            and then no larger one is asked for.
        largest: Tokens of the largest step to try.

    Returns:
        None if no step could be measured.
    """
    times: dict[int, float] = {}
    for tokens in _doubling(largest):
        if (step_s := measure(tokens)) is None:
            break
        times[tokens] = step_s
    if not times:
        return None
    low, high = 0, _first_enough(times)
    if saturated := high < max(times):
        low = max((tokens for tokens in times if tokens < high), default=high)
    for _ in range(_REFINEMENTS if saturated else 0):
        middle = (low + high) // 2
        if middle in times or (step_s := measure(middle)) is None:
            break
        times[middle] = step_s
        low, high = (low, middle) if _first_enough(times) <= middle else (middle, high)
    high, undisturbed = _first_enough(times), _undisturbed(times)
    return PivotFound(pivot=Pivot(high, undisturbed[high]), saturated=saturated, times=undisturbed)


def most_sizes(largest: int) -> int:
    """Return how many sizes `search` measures at most."""
    return len(_doubling(largest)) + _REFINEMENTS


def prompts_of(tokens: int, longest: int, max_num_seqs: int) -> list[int]:
    """Return the lengths of prompts that make up a step of so many tokens.

    They have 512 tokens at most, so that it is the step that grows and not attention, unless that would be more
    requests than a step may have; and they are equal, but for a token.

    Args:
        tokens: Of the step.
        longest: Longest prompt, in tokens.
        max_num_seqs: Most requests of a step.
    """
    most = min(longest, max(_PROMPT_TOKENS, -(-tokens // max_num_seqs)))
    count = -(-tokens // most)
    return [tokens // count + (place < tokens % count) for place in range(count)]


def _doubling(largest: int) -> list[int]:
    """Sizes from the smallest one on, such that the last is the largest and every other half of the next."""
    halved = [largest >> halvings for halvings in range(largest.bit_length())]
    return [tokens for tokens in reversed(halved) if tokens >= min(_SMALLEST, largest)]


def _first_enough(times: dict[int, float]) -> int:
    rates = {tokens: tokens / step_s for tokens, step_s in _undisturbed(times).items()}
    best = max(rates.values())
    return min(tokens for tokens, rate in rates.items() if rate >= SHARE * best)


def _undisturbed(times: dict[int, float]) -> dict[int, float]:
    """Return the times, ascending by size, each at most that of any larger step: more work never takes less time."""
    shortest = math.inf
    found = {}
    for tokens, step_s in sorted(times.items(), reverse=True):
        shortest = found[tokens] = min(shortest, step_s)
    return dict(reversed(found.items()))
