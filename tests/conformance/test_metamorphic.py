"""Invariant 1: decisions follow predictions, never the true lengths behind them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.conformance_rig import Arrival, Rig, RigConfig
from tests.support.systems_matrix import SYSTEMS, Row
from tests.support.traces import Event, configs, play, searched, traces, with_true_lengths

_FEW_CHANGED = st.dictionaries(st.integers(0, 7), st.integers(1, 48), min_size=1, max_size=3)
_BLIND = [row for row in SYSTEMS if not row.reads_truth]


def decisions_before_lengths_tell(first: Rig, second: Rig) -> int:
    """Decisions taken before any request finished in one run at another time than in the other."""
    told = [len(first.loop.decisions), len(second.loop.decisions)]
    for req_id, outcome in first.loop.outcomes.items():
        other = second.loop.outcomes[req_id]
        if outcome.finish_step != other.finish_step:
            told += [step for step in (outcome.finish_step, other.finish_step) if step is not None]
    return min(told)


@pytest.mark.parametrize("row", _BLIND, ids=str)
def test_invariant_1_other_true_lengths_change_no_decision_until_a_finish_differs(row: Row) -> None:
    compared = []

    @searched(row)
    @given(config=configs(), trace=traces(), lengths=_FEW_CHANGED)
    def check(config: RigConfig, trace: Sequence[Event], lengths: dict[int, int]) -> None:
        first = play(Rig(row, config), trace)
        second = play(Rig(row, config), with_true_lengths(trace, lengths))
        common = decisions_before_lengths_tell(first, second)
        compared.append(common)
        assert first.loop.decisions[:common] == second.loop.decisions[:common]

    check()
    assert sum(compared) > 10 * len(compared), "the runs hardly overlap: the comparison says nothing"


def test_invariant_1_the_comparison_notices_an_oracle() -> None:
    """A system that does read true lengths must fail the check above, or the check is blind."""
    oracle = next(row for row in SYSTEMS if row.reads_truth)
    config = RigConfig(num_blocks=14, max_num_seqs=1)
    trace = [Event("arrive", (_arrival(length),)) for length in (40, 30, 5, 20)] + [Event("step")] * 3
    first = play(Rig(oracle, config), trace)
    second = play(Rig(oracle, config), with_true_lengths(trace, {0: 5, 2: 40}))
    common = decisions_before_lengths_tell(first, second)
    assert first.loop.decisions[:common] != second.loop.decisions[:common]


def _arrival(true_len: int) -> Arrival:
    return Arrival(prompt_len=20, max_tokens=48, true_len=true_len)
