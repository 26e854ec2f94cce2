"""Counts hints that nobody follows because their names are misspelt, and says so once for each name."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import islice
from typing import Any

from prometheus_client import Counter
from vllm.logger import init_logger

from vllm_ext import hints

logger = init_logger("vllm.vllm_ext.hints")

_MOST_NAMED = 64
"""Names that are logged: a client must not fill a log."""
_MOST_COMPARED = 16
"""Keys of a request that are compared with the names of hints: it may bring thousands."""
_known: set[str] = set(hints.KEYS)
"""Keys that need no look: ours, and those of other people that came first."""
_named: set[str] = set()


def note(given: Mapping[str, Any]) -> None:
    """Look for misspelt hints among a request's ``vllm_xargs``."""
    new = given.keys() - _known
    if not new:
        return
    looked_at = set(islice(new, _MOST_COMPARED))
    found = hints.misspelt(looked_at)
    if len(_known) < _MOST_NAMED:
        _known.update(looked_at - found.keys())  # other people's; they come with every request
    for key, meant in found.items():
        _count(key, f"did you mean {meant!r}?")


def note_outside(body: Mapping[str, Any]) -> None:
    """Look for hints that stand in a request's body itself, where nobody reads them."""
    for key in filter(body.__contains__, hints.KEYS):
        _count(key, "hints belong in 'vllm_xargs'")


def _count(key: str, advice: str) -> None:
    _counter().inc()
    if key not in _named and len(_named) < _MOST_NAMED:
        _named.add(key)
        logger.warning("a request has %.80r, which is no hint and is ignored: %s", key, advice)


@functools.cache
def _counter() -> Counter:
    """Made when the first one comes: vLLM clears the registry when a server starts."""
    return Counter("vllm_ext:misspelt_hints", "Hints that were ignored since their names are misspelt or misplaced.")
