"""Whatever happens in whatever order: no KV is torn, no block or chunk is lost, every request ends (invariants 3, 6).

The walks take 40,000 steps in all (100,000 in full), or ``SOAK_STEPS``, and begin with ``SOAK_SEED``: see `make soak`.
vLLM goes through sets of request ids: a walk repeats itself exactly only with the same ``PYTHONHASHSEED``.
"""

from __future__ import annotations

import os

import pytest

from tests.support.extent import quick
from tests.support.tier_walk import walk
from vllm_ext.config.kv_tier import AUTO, IN_STEP

STEPS = int(os.environ.get("SOAK_STEPS", quick(20_000, full=100_000)))
FIRST_SEED = int(os.environ.get("SOAK_SEED", "0"))
PART_STEPS = 20_000


LOADS_IN_STEPS = ["step_loads", "failed_step_loads", "spoilt_requests"]


@pytest.mark.parametrize("part", range(-(-STEPS // PART_STEPS)))
def test_invariants_3_and_6_hold_on_a_long_walk_through_all_that_can_happen(part: int) -> None:
    seen = walk(PART_STEPS, FIRST_SEED + part)
    assert seen.steps >= PART_STEPS
    assert [name for name, count in vars(seen).items() if not count] == LOADS_IN_STEPS, "something never happened"


@pytest.mark.parametrize("load", [IN_STEP, AUTO])
def test_they_hold_with_loads_within_steps_that_fail(load: str) -> None:
    seen = walk(quick(4_000, full=12_000), 17, steps_per_engine=500, load=load, failing_loads=0.3)
    assert seen.step_loads > seen.failed_step_loads > 0
    assert [seen.spoilt_requests > 0, seen.aborts > 0, seen.resets > 0, seen.preemptions > 0] == [True] * 4
