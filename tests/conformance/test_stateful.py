"""Anything may happen in any order: no request is lost (invariant 3) and no block either (invariant 6)."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.v1.core.sched.interface import PauseState

from tests.support.conformance_rig import Arrival, Rig, RigConfig
from tests.support.distributions import nine
from tests.support.systems_matrix import SYSTEMS, Row
from tests.support.traces import arrivals, configs, searched


def machine(row: Row) -> type[RuleBasedStateMachine]:
    """A client, an operator and the passage of time, around one system."""

    class Machine(RuleBasedStateMachine):
        rig: Rig

        @initialize(config=configs(), crowd=st.lists(arrivals(), max_size=6))
        def start(self, config: RigConfig, crowd: list[Arrival]) -> None:
            self.rig = Rig(row, config)
            for arrival in crowd:
                self.rig.arrive(arrival)

        @rule(arrival=arrivals())
        def arrive(self, arrival: Arrival) -> None:
            self.rig.arrive(arrival)

        @rule(count=st.integers(1, 6))
        def step(self, count: int) -> None:
            for _ in range(count):
                self.rig.step()
                self.rig.audit()

        @rule(number=st.integers(0, 30), while_executing=st.booleans())
        def abort(self, number: int, while_executing: bool) -> None:
            self.rig.abort(number, while_executing)

        @rule(seconds=st.sampled_from([0.1, 1.5, 30.0]))
        def time_passes(self, seconds: float) -> None:
            self.rig.advance(seconds)

        @rule()
        def reset_prefix_cache(self) -> None:
            self.rig.reset_prefix_cache()

        @rule(state=st.sampled_from(list(PauseState)))
        def pause(self, state: PauseState) -> None:
            self.rig.pause(state)

        @precondition(lambda self: hasattr(self.rig.scheduler, "update_predictions"))
        @rule(number=st.integers(0, 30), tokens=st.integers(1, 100))
        def late_prediction(self, number: int, tokens: int) -> None:
            self.rig.scheduler.update_predictions([[f"r{number}", nine(tokens), "late"]])

        @invariant()
        def books_add_up(self) -> None:
            self.rig.audit()

        def teardown(self) -> None:
            if hasattr(self, "rig"):
                self.rig.drain(before_step=self.rig.audit)

    return Machine


@pytest.mark.parametrize("row", SYSTEMS, ids=str)
def test_invariants_3_and_6_hold_whatever_happens(row: Row) -> None:
    run_state_machine_as_test(machine(row), settings=searched(row))
