"""Whatever happens in whatever order: no KV is torn, no block or chunk is lost, every request ends (invariants 3, 6).

The walks take 40,000 steps in all (100,000 in full), or ``SOAK_STEPS``, and begin with ``SOAK_SEED``: see `make soak`.
vLLM goes through sets of request ids: a walk repeats itself exactly only with the same ``PYTHONHASHSEED``.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.extent import quick
from vllm_ext.config.kv_tier import AHEAD, PREFIX_POLICIES, STORES

from .tier_stateful_driver import walk
from .tier_stateful_rig import MAX_MODEL_LEN, MIN_BLOCKS, Setup, TierRig

STEPS = int(os.environ.get("SOAK_STEPS", quick(40_000, full=100_000)))
FIRST_SEED = int(os.environ.get("SOAK_SEED", "0"))
PART_STEPS = 20_000


@pytest.mark.parametrize("part", range(-(-STEPS // PART_STEPS)))
def test_a_long_walk_through_all_that_can_happen(part: int) -> None:
    seen = walk(PART_STEPS, FIRST_SEED + part)
    assert seen.steps >= PART_STEPS
    counted = vars(seen)
    assert [name for name, count in counted.items() if not count] == [], "something never happened"


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """Engines with little room, so that things meet."""
    store = draw(st.sampled_from(STORES))
    return Setup(
        async_scheduling=draw(st.booleans()),
        prefix_caching=store == AHEAD or draw(st.booleans()),
        bits=draw(st.sampled_from([16, 8])),
        store=store,
        policy=draw(st.sampled_from(PREFIX_POLICIES)),
        host_chunks=draw(st.sampled_from([1, 3, 8, 30])),
        num_blocks=draw(st.sampled_from([MIN_BLOCKS, MIN_BLOCKS + 4, 2 * MIN_BLOCKS])),
        max_num_seqs=draw(st.integers(1, 5)),
        token_budget=draw(st.sampled_from([8, 32])),
        slow=draw(st.sampled_from([0.0, 0.5, 1.0])),
        failing_stores=draw(st.sampled_from([0.0, 0.3])),
        failing_loads=draw(st.sampled_from([0.0, 0.3])),
        copies_pay=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


class TierMachine(RuleBasedStateMachine):
    """Clients, an operator and the passage of time around one engine."""

    rig: TierRig

    @initialize(setup=setups())
    def start(self, setup: Setup) -> None:
        self.rig = TierRig(setup)

    @rule(opening=st.integers(0, 2), shared=st.integers(0, 40), own=st.integers(1, 12), output=st.integers(1, 25))
    def ask(self, opening: int, shared: int, own: int, output: int) -> None:
        number = len(self.rig.prompts)
        prompt = [1000 * (1 + opening) + i for i in range(shared)] + [(100 + 13 * number + i) % 900 for i in range(own)]
        self.rig.add(prompt, output)

    @rule(number=st.integers(0, 40), output=st.integers(1, 10))
    def ask_the_same_again(self, number: int, output: int) -> None:
        if f"r{number}" in self.rig.prompts:
            self.rig.add(self.rig.prompts[f"r{number}"], output)

    @rule(number=st.integers(0, 40), more=st.integers(1, 5))
    def next_turn(self, number: int, more: int) -> None:
        if f"r{number}" in self.rig.prompts:
            history = self.rig.history(f"r{number}")
            if len(history) + more < MAX_MODEL_LEN - 2:
                self.rig.add(history + list(range(50, 50 + more)), 4)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()

    @rule(number=st.integers(0, 40), while_executing=st.booleans())
    def abort(self, number: int, while_executing: bool) -> None:
        if f"r{number}" in self.rig.prompts:
            self.rig.abort(f"r{number}", while_executing=while_executing)

    @rule(number=st.integers(0, 40))
    def preempt(self, number: int) -> None:
        self.rig.preempt(f"r{number}")

    @rule(running=st.booleans(), connector=st.booleans())
    def reset(self, running: bool, connector: bool) -> None:
        self.rig.reset(running=running, connector=connector)

    @invariant()
    def books_add_up(self) -> None:
        if hasattr(self, "rig"):
            self.rig.audit()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.drain()


def test_invariants_3_and_6_hold_in_the_order_that_hypothesis_likes_least() -> None:
    run_state_machine_as_test(TierMachine, settings=settings(max_examples=settings.default.max_examples))
