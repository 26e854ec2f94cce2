"""One client's objectives do not stop the others' prompts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.steering import Rig, unwatched
from vllm_ext.simulation.engine.harness import make_request

BUDGETED = ("sarathi", "sarathi-static", "accelgen", "auto")


def _steps_until_all_prompts_are_computed(system: str, slo: dict[str, Any], most: int = 400) -> int:
    rig = unwatched(system, num_blocks=4000, max_num_seqs=32, max_num_batched_tokens=8192, max_model_len=4096)

    def add(name: str, prompt: int, length: int, **hints: Any) -> None:
        rig.lengths[name] = length
        rig.loop.add(make_request(name, prompt, max_tokens=3000, arrival_time=rig.clock(), extra_args=hints or None))

    add("one", 16, 2500, osl=2500, **slo)
    for _ in range(3):
        rig.loop.step()
        rig.clock.advance(0.02)
    for i in range(8):
        add(f"p{i}", 2000, 20)
    for number in range(most):
        rig.loop.step()
        rig.clock.advance(0.02)
        if all(rig.loop.outcomes[f"p{i}"].first_token_step is not None for i in range(8)):
            return number + 1
    raise AssertionError(f"not within {most} steps")


@pytest.mark.parametrize("system", BUDGETED)
def test_an_objective_that_decodes_break_by_themselves_is_lost_and_holds_nobody_up(system: str) -> None:
    without = _steps_until_all_prompts_are_computed(system, {})
    assert _steps_until_all_prompts_are_computed(system, {"tbt_slo_ms": 0.001}) == without


@pytest.mark.parametrize("system", BUDGETED)
def test_the_tightest_objective_that_can_be_kept_leaves_64_tokens_to_prompts(system: str) -> None:
    """8 prompts of 2,000 tokens in chunks of 64 are 250 steps, and not 16,000 of one token."""
    for milliseconds in (5.0, 10.0, 15.0, 20.0, 40.0):
        assert _steps_until_all_prompts_are_computed(system, {"tbt_slo_ms": milliseconds}) <= 250 + 8


@pytest.mark.parametrize("system", ["fcfs", *BUDGETED])
def test_an_objective_below_the_operators_bound_is_left_out_and_counted(system: str) -> None:
    rig = Rig(system, options={"slo": {"least_tbt_ms": 50.0, "least_ttft_ms": 100.0, "least_jct_ms": 1000.0}})
    for number, hints in enumerate(({"tbt_slo_ms": 49.0}, {"ttft_slo_ms": 99.0}, {"jct_slo_ms": 999.0, "osl": 4})):
        rig.add(f"below-{number}", **hints)  # type: ignore[arg-type]
    rig.add("at", tbt_slo_ms=50.0, ttft_slo_ms=100.0, jct_slo_ms=1000.0)
    assert rig.state["bad_hints"] == 3
    jobs = rig.scheduler.tracked.by_id
    assert [jobs[f"below-{number}"].slo.tbt_s for number in range(3)] == [None] * 3
    assert (jobs["at"].slo.tbt_s, jobs["at"].slo.ttft_s, jobs["at"].slo.e2e_s) == (0.05, 0.1, 1.0)
    rig.drain()
