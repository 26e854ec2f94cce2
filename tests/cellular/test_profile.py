"""What a profile counts."""

from __future__ import annotations

import pytest

from vllm_ext.cellular import profile
from vllm_ext.cellular.models import build


def test_on_a_cpu_the_least_time_of_the_thread_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of each batch is left out: it may do what is done once."""
    took = iter([1.0, 9.0, 4.0, 6.0] * 2)
    readings = iter([reading for seconds in took for reading in (100.0, 100.0 + seconds)])
    monkeypatch.setattr(profile.time, "thread_time", lambda: next(readings))
    cell, *_ = build("lstm", hidden=8).cells
    assert profile.measure(cell, [1, 2], repeats=3).seconds == {1: 4.0, 2: 4.0}
