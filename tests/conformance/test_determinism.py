"""Invariant 9: the same events give the same bytes, whatever the wall clock says; the hash seed: test_hash_seed.py."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest
from hypothesis import given

from tests.support.conformance_rig import Rig, RigConfig
from tests.support.systems_matrix import SYSTEMS, Row
from tests.support.traces import Event, configs, play, searched, traces

_CLOCKS = ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns")


@pytest.mark.parametrize("row", SYSTEMS, ids=str)
def test_invariant_9_same_events_same_decisions_under_a_mad_wall_clock(row: Row) -> None:
    @searched(row)
    @given(config=configs(), trace=traces())
    def check(config: RigConfig, trace: Sequence[Event]) -> None:
        once = play(Rig(row, config), trace).loop.decision_log()
        with pytest.MonkeyPatch.context() as patch:
            # Leaps forth and back by hours: whoever reads it decides otherwise.
            leaps = itertools.cycle([0.0, 1e5, -3e4, 7e5, 12.0])
            for name in _CLOCKS:
                real, unit = getattr(time, name), 10**9 if name.endswith("_ns") else 1
                patch.setattr(time, name, lambda real=real, unit=unit: real() + type(real())(next(leaps) * unit))
            again = play(Rig(row, config), trace).loop.decision_log()
        assert once == again

    check()
