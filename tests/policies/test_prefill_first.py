"""Prompts first, in steps of their own: vLLM 0.2's rule worked by hand, and that both policies agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.config import ConfigError
from vllm_ext.policies.admission.prefill_first import PrefillFirst
from vllm_ext.policies.budget.separate_batches import SeparateBatches
from vllm_ext.scheduling.plan import AdmissionPlan, BudgetPlan

from .pool_step import PoolStep, admits, prompts


def admitted(step: PoolStep, watermark: float = 0.0) -> int | None:
    return admits(PrefillFirst(watermark=watermark).plan(step), step)  # type: ignore[arg-type]


def skipped(step: PoolStep, admission: AdmissionPlan | None = None) -> tuple[str, ...]:
    """Who is kept out of the step that the pair of policies plans."""
    step.admission = PrefillFirst().plan(step) if admission is None else admission  # type: ignore[arg-type]
    plan = SeparateBatches().plan(step)  # type: ignore[arg-type]
    assert plan == BudgetPlan(skip=plan.skip), "the only knob"
    return plan.skip


@pytest.mark.parametrize(
    ("queue", "expected"),
    [
        pytest.param(((20, 9), (44, 9), (1, 9)), 2, id="64 of 64 tokens, decodes take none"),
        pytest.param(((20, 9), (45, 9), (1, 9)), 1, id="one token too many ends the scan"),
        pytest.param(((65, 9), (1, 9)), 1, id="longer than a step: alone"),
        pytest.param(((1, 9), (65, 9)), 1, id="longer than a step: not beside another"),
        pytest.param(((1, 500), (1, 500)), 2, id="outputs are not reserved"),
    ],
)
def test_whole_prompts_fill_the_step(queue: tuple[tuple[int, int], ...], expected: int) -> None:
    assert admitted(PoolStep(queue=prompts(*queue), bounds=(16,) * 4)) == expected


@pytest.mark.parametrize(
    ("free", "watermark", "expected"),
    [(1, 0.0, 0), (2, 0.0, 1), (4, 0.0, 2), (2, 0.01, 0), (3, 0.01, 1), (11, 0.1, 0), (12, 0.1, 1), (3, 0.019, 1)],
)
def test_an_admission_leaves_the_watermark_free(free: int, watermark: float, expected: int) -> None:
    """Prompts of 20 tokens take 2 blocks; of 100 blocks, 1 % is one block and a fraction of one is none."""
    step = PoolStep(queue=prompts((20, 9), (20, 9)), bounds=(16,), num_total_blocks=100, num_free_blocks=free)
    assert admitted(step, watermark) == expected


def test_nobody_joins_a_prompt_that_is_half_done() -> None:
    assert admitted(PoolStep(queue=prompts((1, 9)), bounds=(16, 200), unfinished=(5,))) == 0


def test_seats_end_the_admissions() -> None:
    step = PoolStep(queue=prompts(*[(1, 9)] * 9), bounds=(16,) * 6)
    assert admitted(step) == 2
    assert admitted(replace(step, bounds=(16,) * 8)) is None


def test_one_request_alone_always_starts() -> None:
    assert admitted(PoolStep(queue=prompts((20, 9)), num_free_blocks=2), watermark=0.9) == 1


def test_a_preempted_request_returns_with_what_it_generated() -> None:
    (view,) = prompts((30, 90))
    step = PoolStep(queue=(view._replace(num_output_tokens=20),), bounds=(16,), num_free_blocks=3)
    assert admitted(step) == 0
    assert admitted(replace(step, num_free_blocks=4)) == 1


def test_decodes_are_kept_out_of_a_step_of_prompts_and_run_in_the_others() -> None:
    step = PoolStep(queue=prompts((20, 9)), bounds=(16, 16))
    assert skipped(step) == ("r0", "r1")
    assert skipped(replace(step, num_free_blocks=1)) == (), "the prompt does not fit"
    assert skipped(replace(step, queue=())) == ()
    assert skipped(replace(step, bounds=(16,) * 8)) == (), "no seat"


def test_a_half_done_prompt_goes_on_without_decodes() -> None:
    assert skipped(PoolStep(bounds=(16, 16, 200), unfinished=(30,))) == ("r0", "r1")
    assert skipped(PoolStep(bounds=(200,), unfinished=(30,))) == ()


def test_an_admission_policy_without_a_cap_leaves_the_step_alone() -> None:
    assert skipped(PoolStep(queue=prompts((20, 9)), bounds=(16, 16)), AdmissionPlan()) == ()


_QUEUE = st.lists(st.tuples(st.integers(1, 80), st.integers(1, 200)), min_size=1, max_size=8)


@given(queue=_QUEUE, running=st.integers(0, 7), free=st.integers(0, 30), more=st.integers(0, 30))
def test_more_memory_never_admits_less(queue: list[tuple[int, int]], running: int, free: int, more: int) -> None:
    step = PoolStep(queue=prompts(*queue), bounds=(16,) * running, num_free_blocks=free)
    base, richer = admitted(step, 0.05), admitted(replace(step, num_free_blocks=free + more), 0.05)
    assert base is not None
    assert richer is not None
    assert richer >= base


@given(queue=_QUEUE, running=st.integers(0, 8), free=st.integers(0, 30), prefilling=st.booleans())
def test_a_step_is_of_prompts_or_of_decodes(
    queue: list[tuple[int, int]], running: int, free: int, prefilling: bool
) -> None:
    half_done = (7,) if prefilling and running else ()
    step = PoolStep(queue=prompts(*queue), bounds=(16,) * running, num_free_blocks=free, unfinished=half_done)
    kept_out = skipped(step)
    joining = max(0, (step.admission.max_running or 0) - step.num_running)
    assert bool(kept_out) == bool((joining or half_done) and step.decoding())
    assert kept_out in ((), step.decoding())


@pytest.mark.parametrize("watermark", [-0.1, 1.0, 1.5])
def test_a_bad_watermark_is_named(watermark: float) -> None:
    with pytest.raises(ConfigError) as caught:
        PrefillFirst(watermark=watermark)
    assert (caught.value.field, caught.value.value) == ("admission.watermark", watermark)
