"""How much the tests try: ``make test`` a covering part, ``make test-all`` (``VLLM_EXT_TEST_FULL=1``) everything.

    @pytest.mark.parametrize("case", with_full(COVERING, EVERY))
    def test_it(case): ...          # COVERING always, the rest of EVERY only in full
    STEPS = quick(4_000, full=12_000)

A whole test that only ``make test-all`` runs carries ``@pytest.mark.full``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

FULL = os.environ.get("VLLM_EXT_TEST_FULL", "") not in ("", "0")

HANG_S = 1500
"""When a child process or thread of a test counts as hung. No verdict depends on how busy the machine is."""


def quick(amount: T, *, full: T) -> T:
    """Return ``amount``, or ``full`` where everything is to be tried."""
    return full if FULL else amount


def with_full(covering: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """Return parameters: those of ``covering`` first, then the others of ``every``, which only a full run takes.

    A tuple holds the values of several arguments.
    """
    chosen = list(covering)
    rest = [case for case in every if case not in chosen]
    return [*chosen, *(pytest.param(*_values(case), marks=pytest.mark.full) for case in rest)]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
