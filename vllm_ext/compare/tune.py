"""The best flags of a server, searched on the server itself, so that a baseline is not beaten for want of a flag."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from vllm_ext.compare.observed import MEAN, ON_TIME, P99
from vllm_ext.compare.servers import Row

BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Token budgets that are tried."""
_KEPT = 3
"""Candidates that get the second, longer round."""
_RESERVE = 0.05
_TAIL_TOLERANCE, _SLACK = 0.05, 0.05
"""By how much P99 may be longer than the server's as it is, and what short runs may add to that."""
_FIRST_LOADS, _SECOND_LOADS = (0.9,), (0.7, 0.9, 1.0)

Measured = Mapping[float, Mapping[str, float]]
"""Measures by load."""
Try = Callable[[Row, Sequence[float], int], Measured]
"""Serves at loads, on the whole or, given 2, on the first half of the requests that the search has for itself."""


def tuned(row: Row, seats: int, attempt: Try, tell: Callable[[str], None]) -> Row:
    """Search token budget, seats and a reserve of KV blocks of a server by successive halving; return it with them.

    Every budget is tried on half of the requests at one load, the best few and the server as it is on all at three,
    and the best of these also with a reserve. Of requests without objectives a candidate with a longer tail than the
    server as it is is out.

    Args:
        row: The server as it is.
        seats: Requests that it runs at a time; vLLM asks for a budget of at least as much.
        attempt: Serves requests that no other run gets.
        tell: Gets a line for what was found.
    """
    candidates = [_with_budget(row, tokens, seats) for tokens in BUDGETS]
    first = {one: attempt(one, _FIRST_LOADS, 2) for one in (row, *candidates)}
    ranked = sorted(candidates, key=lambda one: _score(first[one], first[row]), reverse=True)[:_KEPT]
    second = {one: attempt(one, _SECOND_LOADS, 1) for one in (row, *ranked)}
    best = max(second, key=lambda one: _score(second[one], second[row]))
    reserved = Row(row.name, (*best.flags, "--watermark", f"{_RESERVE:g}"))
    second[reserved] = attempt(reserved, _SECOND_LOADS, 1)
    best = max((best, reserved), key=lambda one: _score(second[one], second[row]))
    tell(f"{row.name}: the best flags are {' '.join(best.flags) or 'none'}")
    return best


def _with_budget(row: Row, tokens: int, seats: int) -> Row:
    fewer = ("--max-num-seqs", str(tokens)) if tokens < seats else ()
    return Row(row.name, (*row.flags, "--max-num-batched-tokens", str(tokens), *fewer))


def _score(ours: Measured, base: Measured) -> float:
    """Return how much better it is, the mean over the loads; out is -inf.

    That is how many more requests are on time, where they have objectives; else the logarithm of how many times lower
    the mean end-to-end latency is.
    """
    total = 0.0
    for load, theirs in base.items():
        if ON_TIME in theirs:
            total += ours[load][ON_TIME] - theirs[ON_TIME] if ON_TIME in ours.get(load, {}) else -math.inf
            continue
        if MEAN not in ours.get(load, {}) or ours[load][P99] > theirs[P99] * (1 + _TAIL_TOLERANCE + _SLACK):
            return -math.inf
        total += math.log(theirs[MEAN] / ours[load][MEAN])
    return total / len(base)
