"""Invariant 2: a policy that fails costs its step the plan and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.conformance_rig import Rig, RigConfig
from tests.support.systems_matrix import SYSTEMS, Row
from tests.support.traces import Event, configs, play, searched, traces

from .faulty_policies import EVERY_STEP, FAULTS, FAULTY, HOSTILE

_UPSTREAM = next(row for row in SYSTEMS if row.name == "upstream")


@pytest.mark.parametrize("row", FAULTY, ids=str)
def test_invariant_2_nothing_is_lost_when_policies_fail_now_and_then(row: Row) -> None:
    raised = []

    @searched(row)
    @given(config=configs(), trace=traces(), pattern=st.lists(st.booleans(), min_size=1, max_size=9))
    def check(config: RigConfig, trace: Sequence[Event], pattern: list[bool]) -> None:
        FAULTS.arm(pattern)
        rig = play(Rig(row, config), trace)
        assert rig.state()["fallbacks"] == FAULTS.raised
        raised.append(FAULTS.raised)

    check()
    assert sum(raised), "no policy ever failed"


@pytest.mark.parametrize("row", FAULTY, ids=str)
def test_invariant_2_steps_of_a_failing_policy_admit_in_order_of_arrival(row: Row) -> None:
    @searched(row)
    @given(config=configs(), trace=traces())
    def check(config: RigConfig, trace: Sequence[Event]) -> None:
        FAULTS.arm([True])
        rig = play(Rig(row, config), trace)
        first_seen = list(dict.fromkeys(req_id for d in rig.loop.decisions for req_id, _ in d.scheduled))
        assert first_seen == sorted(first_seen, key=lambda req_id: int(req_id[1:]))

    check()


@pytest.mark.parametrize("row", EVERY_STEP, ids=str)
def test_invariant_2_without_pressure_a_failing_policy_leaves_upstreams_decisions(row: Row) -> None:
    @searched(row)
    @given(trace=traces(), depth=st.sampled_from([1, 2]), caching=st.booleans(), seats=st.sampled_from([1, 3, 6]))
    def check(trace: Sequence[Event], depth: int, caching: bool, seats: int) -> None:
        FAULTS.arm([True])
        config = RigConfig(depth=depth, caching=caching, num_blocks=64, max_num_seqs=seats)
        trace = [event for event in trace if event.method != "reset_prefix_cache"]
        ours, upstream = play(Rig(row, config), trace), play(Rig(_UPSTREAM, config), trace)
        assert ours.loop.decisions == upstream.loop.decisions

    check()


def test_invariant_2_plans_that_ask_for_nonsense_break_nothing() -> None:
    @searched(HOSTILE)
    @given(
        config=configs(),
        trace=traces(),
        pattern=st.lists(st.booleans(), min_size=2, max_size=9).filter(lambda p: not all(p)),
        seed=st.integers(0, 1000),
    )
    def check(config: RigConfig, trace: Sequence[Event], pattern: list[bool], seed: int) -> None:
        FAULTS.arm(pattern, seed)
        play(Rig(HOSTILE, config), trace)

    check()
