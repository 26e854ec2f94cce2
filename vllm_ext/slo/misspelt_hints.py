"""Counts hints that nobody follows because their names are misspelt, and says so once for each name."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter
from vllm.logger import init_logger

from vllm_ext import hints

logger = init_logger("vllm.vllm_ext.hints")

_MOST_NAMED = 64
"""Names that are logged: a client must not fill a log."""
_known: set[str] = set()
_named: set[str] = set()


def note(given: Mapping[str, Any]) -> None:
    """Look for misspelt hints among a request's ``vllm_xargs``."""
    new = given.keys() - _known - set(hints.KEYS)
    if not new:
        return
    found = hints.misspelt({key: given[key] for key in new})
    if len(_known) < _MOST_NAMED:
        _known.update(new - found.keys())  # other people's; they come with every request
    for key, meant in found.items():
        _count(key, f"did you mean {meant!r}?")


def note_outside(body: Mapping[str, Any]) -> None:
    """Look for hints that stand in a request's body itself, where nobody reads them."""
    for key in body.keys() & set(hints.KEYS):
        _count(key, "hints belong in 'vllm_xargs'")


def _count(key: str, advice: str) -> None:
    _counter().inc()
    if key not in _named and len(_named) < _MOST_NAMED:
        _named.add(key)
        logger.warning("a request says %.80r, which is no hint and is ignored: %s", key, advice)


@functools.cache
def _counter() -> Counter:
    """Made when the first one comes: vLLM clears the registry when a server starts."""
    return Counter("vllm_ext:misspelt_hints", "Hints that were ignored since their names are misspelt or misplaced.")
