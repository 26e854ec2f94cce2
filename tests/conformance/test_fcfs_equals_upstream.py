"""Invariant 8: with nothing to steer, every decision is upstream's."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given

from tests.support.conformance_rig import Rig, RigConfig
from tests.support.systems_matrix import SYSTEMS
from tests.support.traces import Event, configs, play, searched, traces

_UPSTREAM, _FCFS = (next(row for row in SYSTEMS if row.name == name) for name in ("upstream", "fcfs"))


def test_invariant_8_fcfs_decides_as_upstream() -> None:
    preempted = []

    @searched(_FCFS)
    @given(config=configs(), trace=traces())
    def check(config: RigConfig, trace: Sequence[Event]) -> None:
        ours, upstream = play(Rig(_FCFS, config), trace), play(Rig(_UPSTREAM, config), trace)
        preempted.extend(req_id for decision in upstream.loop.decisions for req_id in decision.preempted)
        assert ours.loop.decisions == upstream.loop.decisions
        assert ours.loop.outcomes == upstream.loop.outcomes

    check()
    assert preempted, "no trace had any pressure: the comparison says little"
