"""Token budgets: from the TBT objective, of a fixed size, in proportion to the tightest objective."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.pool_step import PoolStep, half_done, prompts
from vllm_ext.contract import RequestView, Split
from vllm_ext.contract.objective import Slo
from vllm_ext.experiments.ablations import ChunksApart
from vllm_ext.step_time.runtime import Pivot, RuntimeModel, StepFeatures
from vllm_ext.systems.accelgen import SloPivotBudget
from vllm_ext.systems.baselines import FixedForward, SeparateBatches
from vllm_ext.systems.sarathi import TbtBudget

COEFFICIENTS = (0.01, 1e-4, 1e-4, 1e-7, 1e-9)
"""10 ms a step, 0.1 ms a decode or prompt token, contexts on top."""
MODEL = RuntimeModel(COEFFICIENTS, Pivot(64, 0.1))
SATURATES_LATE = RuntimeModel(COEFFICIENTS, Pivot(768, 0.1))


def decoding(count: int, context: int = 100) -> tuple[RequestView, ...]:
    return tuple(RequestView(f"r{i}", float(i), context - 1, 1, context, max_tokens=500) for i in range(count))


def mixed(decodes: int, *, context: int = 100, computed: int = 0, tbt_s: float | None = None) -> PoolStep:
    """Some decode, one is prefilling, one waits."""
    running = (*decoding(decodes, context), half_done(20_000, computed))
    return PoolStep(
        running=running,
        queue=prompts((100, 10)),
        objectives_s=() if tbt_s is None else (tbt_s,) * len(running),
        runtime=MODEL,
        token_budget=8192,
        max_running=300,
    )


def step_s(step: PoolStep, tokens: int) -> float:
    """What the step takes by the model if the budget is used up."""
    chunk = tokens - step.num_decoding
    computed = step.prefilling()[0].num_computed_tokens
    pairs = chunk * (computed + chunk / 2)
    return MODEL.step_time_s(StepFeatures(step.num_decoding, chunk, step.context_tokens + chunk, pairs))


def test_the_dynamic_budget_fills_the_objective_and_no_more() -> None:
    policy = TbtBudget(tile_tokens=1, safety=1.0)
    step = mixed(10, tbt_s=0.1)
    tokens = policy.split(step).tokens
    assert tokens is not None
    assert step_s(step, tokens) <= 0.1 < step_s(step, tokens + 1)


def test_the_dynamic_budget_shrinks_as_prefill_batch_and_contexts_grow() -> None:
    policy = TbtBudget(tile_tokens=1)

    def chunk(step: PoolStep) -> int:
        tokens = policy.split(step).tokens
        assert tokens is not None
        return tokens - step.num_decoding

    usual = chunk(mixed(10, tbt_s=0.1))
    assert chunk(mixed(10, tbt_s=0.1, computed=8000)) < usual
    assert chunk(mixed(50, tbt_s=0.1)) < usual
    assert chunk(mixed(10, tbt_s=0.1, context=4000)) < usual


def test_drafts_are_priced_like_the_tokens_of_a_prompt() -> None:
    """A step with drafts is learned as one of chunks; 10 decodes verify 3 drafts each."""
    policy = TbtBudget(tile_tokens=1, safety=1.0, min_prefill_tokens=1)
    step = replace(mixed(10, tbt_s=0.1), num_drafts=3)
    tokens = policy.split(step).tokens
    assert tokens is not None
    pairs = tokens * tokens / 2

    def chunks_s(count: int) -> float:
        return MODEL.step_time_s(StepFeatures(0, count, step.context_tokens + count, pairs))

    assert chunks_s(tokens) <= 0.1 < chunks_s(tokens + 2)
    step.objectives_s = (0.001,)
    assert policy.split(step).tokens == 41, "what is decoded, drafts included, and a token of a prompt"


def test_the_static_budget_looks_at_its_reference_batch_only() -> None:
    policy = TbtBudget(dynamic=False, tile_tokens=1, safety=1.0, reference_decodes=32, reference_context=1000)
    budgets = {policy.split(mixed(n, computed=c, tbt_s=0.1)).tokens for n in (1, 30) for c in (0, 9000)}
    assert len(budgets) == 1
    (tokens,) = budgets
    assert tokens is not None
    reference = StepFeatures(32, tokens - 32, 32 * 1000 + tokens - 32, (tokens - 32) ** 2 / 2)
    assert MODEL.step_time_s(reference) <= 0.1
    assert TbtBudget(dynamic=False, tokens=512).split(mixed(3)).tokens == 512


def test_the_tile_is_the_device_s_unless_it_is_named() -> None:
    policy = TbtBudget(dynamic=False, tokens=760)
    unknown = mixed(10, tbt_s=0.1)
    known = replace(unknown, runtime=RuntimeModel(COEFFICIENTS, tile_tokens=256))
    assert policy.split(known).tokens == 512
    assert replace(policy, tile_tokens=128).split(known).tokens == 640
    assert policy.split(unknown).tokens == 704, "64, where nothing is known"


def test_as_published_sarathi_grants_nothing_where_decodes_fill_the_budget() -> None:
    published = TbtBudget(dynamic=False, tokens=8, min_prefill_tokens=0)
    step = mixed(10, tbt_s=0.1)
    assert published.split(step).tokens == step.decode_tokens
    assert replace(published, min_prefill_tokens=64).split(step).tokens == step.decode_tokens + 64


@pytest.mark.parametrize(("tokens", "tile", "expected"), [(257, 256, 256), (511, 256, 256), (200, 256, 200)])
def test_budgets_are_whole_tiles(tokens: int, tile: int, expected: int) -> None:
    """One token more than a tile costs up to a third more (Sarathi-Serve, section 4.3)."""
    policy = TbtBudget(dynamic=False, tokens=tokens, tile_tokens=tile, min_prefill_tokens=1)
    assert policy.split(mixed(3)).tokens == expected


def test_prompts_get_a_little_even_where_decodes_alone_break_the_objective() -> None:
    policy = TbtBudget(min_prefill_tokens=16)
    assert policy.split(mixed(200, tbt_s=0.011)).tokens == 216
    assert TbtBudget(min_prefill_tokens=0).split(mixed(200, tbt_s=0.011)).tokens == 200, "Algorithm 3 as published"


def test_a_step_without_decodes_or_without_prompts_is_left_alone() -> None:
    assert TbtBudget().split(PoolStep(running=decoding(4), runtime=MODEL)) == Split()
    lone = PoolStep(running=(half_done(100, 0),), runtime=MODEL)
    assert TbtBudget().split(lone) == Split()
    assert ChunksApart(tokens=64).split(lone) == Split(tokens=64, apart=True)


def test_the_size_of_a_step_of_chunks_does_not_bound_decodes() -> None:
    for number in (0, 1):
        tokens = ChunksApart(tokens=64).split(PoolStep(running=decoding(100), number=number)).tokens
        assert tokens is None or tokens >= 100


@given(
    decodes=st.integers(1, 64),
    context=st.integers(1, 4000),
    computed=st.integers(0, 16_000),
    tbt_s=st.floats(0.005, 2.0),
    looser=st.floats(1.0, 10.0),
    dynamic=st.booleans(),
    tile=st.sampled_from([1, 16, 128]),
)
def test_a_looser_objective_never_reduces_the_budget(
    decodes: int, context: int, computed: int, tbt_s: float, looser: float, dynamic: bool, tile: int
) -> None:
    def tokens(policy: TbtBudget | SloPivotBudget, objective_s: float) -> int:
        found = policy.split(mixed(decodes, context=context, computed=computed, tbt_s=objective_s)).tokens
        assert found is not None
        return found

    for policy in (TbtBudget(dynamic=dynamic, tile_tokens=tile), SloPivotBudget()):
        assert tokens(policy, tbt_s) <= tokens(policy, tbt_s * looser)


def test_accelgens_budget_is_equation_6() -> None:
    step = mixed(10, tbt_s=0.2)
    step.runtime = SATURATES_LATE
    assert SloPivotBudget().split(step).tokens == 1536
    step.objectives_s = ()
    assert SloPivotBudget().split(step).tokens == 1440, "the reading speed, where nobody has an objective"
    step.objectives_s = (1e-4,)
    assert SloPivotBudget().split(step).tokens == 10 + 64, "a token for everybody who decodes, and some for a prompt"
    assert SloPivotBudget(fitted=False, min_prefill_tokens=1).split(step).tokens == 10 + 1, "as published"


def test_as_published_the_tightest_ttft_objective_bounds_accelgens_budget_too() -> None:
    """Of an unfinished prompt, and of the first one that waits; not of those behind it, nor of one that decodes."""
    policy = SloPivotBudget(fitted=False, every_objective=True)
    ours = SloPivotBudget(fitted=False)
    step = mixed(10, tbt_s=0.2)
    *decoding_ones, unfinished = step.running
    step.runtime = SATURATES_LATE
    first, second = prompts((100, 10), (100, 10))

    def tokens(run: float, head: float, behind: float) -> tuple[int | None, int | None]:
        running = (
            *(request._replace(slo=Slo(ttft_s=0.01)) for request in decoding_ones),
            unfinished._replace(slo=Slo(ttft_s=run)),
        )
        queue = (first._replace(slo=Slo(ttft_s=head)), second._replace(slo=Slo(ttft_s=behind)))
        shown = replace(step, running=running, queue=queue)
        return policy.split(shown).tokens, ours.split(shown).tokens

    assert tokens(9.0, 9.0, 0.05) == (1536, 1536)
    assert tokens(0.1, 9.0, 9.0) == (768, 1536)
    assert tokens(9.0, 0.05, 9.0) == (384, 1536)


def test_as_published_a_request_that_was_preempted_bounds_accelgens_budget_by_its_next_token() -> None:
    policy = SloPivotBudget(fitted=False, every_objective=True)
    (asks,) = prompts((100, 10))
    resumes = asks._replace(num_output_tokens=5, slo=Slo(ttft_s=0.01, tbt_s=0.1))
    step = replace(mixed(10, tbt_s=0.2), queue=(resumes,), runtime=SATURATES_LATE)
    assert policy.split(step).tokens == 768


def test_as_published_a_job_bounds_accelgens_budget_by_what_its_steps_may_take() -> None:
    """Two steps for 200 prompt tokens in chunks of 100, and 18 for the output it is predicted to have: 2 s over 20."""
    policy = SloPivotBudget(fitted=False, every_objective=True)
    step = mixed(10, tbt_s=0.2)
    runs, *others = step.running
    job = runs._replace(
        slo=Slo(e2e_s=2.0),
        num_prompt_tokens=200,
        predicted_output_tokens=18,
        num_output_tokens=4,
        step_stats=runs.step_stats._replace(chunk_tokens=100.0),
    )
    step = replace(step, running=(job, *others), runtime=SATURATES_LATE)
    assert policy.split(step).tokens == 768
    assert SloPivotBudget(fitted=False).split(step).tokens == 1536


@pytest.mark.parametrize(("free", "expected"), [(200, 1536), (20, 10 + 20 * 16), (0, 11)])
def test_as_published_accelgen_cuts_prompts_to_the_kv_that_is_left(free: int, expected: int) -> None:
    step = replace(mixed(10, tbt_s=0.2), free=free, total=200, runtime=SATURATES_LATE)
    assert SloPivotBudget(fitted=False, within_kv=True).split(step).tokens == expected
    assert SloPivotBudget(fitted=False).split(step).tokens == 1536


def test_as_published_accelgen_cuts_nothing_where_only_prompts_run_and_hold_all_kv() -> None:
    """One token would take a block from another prompt, which takes it back: nobody came to an end."""
    step = replace(mixed(10, tbt_s=0.2), free=0, total=200, runtime=SATURATES_LATE)
    step = replace(step, running=tuple(view for view in step.running if not view.num_output_tokens))
    assert not step.num_decoding
    assert SloPivotBudget(fitted=False, within_kv=True).split(step).tokens > 100


@pytest.mark.parametrize("policy", [TbtBudget(), SloPivotBudget()], ids=["sarathi", "accelgen"])
def test_one_client_who_names_five_seconds_loosens_nobodys_objective(policy: TbtBudget | SloPivotBudget) -> None:
    step = mixed(10)
    expected = policy.split(step)
    step.objectives_s = (5.0,)
    assert policy.split(step) == expected
    step.objectives_s = (5.0,) * step.num_running
    assert policy.split(step) != expected, "all of them may"


def test_without_a_default_only_named_objectives_count() -> None:
    policy = TbtBudget(default_tbt_ms=0.0)
    step = mixed(10)
    assert policy.split(step) == Split()
    step.objectives_s = (0.1,)
    assert policy.split(step) == TbtBudget().split(mixed(10, tbt_s=0.1))


def test_fastgens_forward_size_is_fixed() -> None:
    step = mixed(10, tbt_s=0.001)
    step.runtime = SATURATES_LATE
    assert FixedForward().split(step).tokens == 768
    assert FixedForward(tokens=256).split(step).tokens == 256
    assert FixedForward(tokens=4).split(step).tokens == 11


def test_prompts_and_decodes_do_not_share_a_step() -> None:
    assert SeparateBatches().split(mixed(3)) == Split(apart=True)


def test_chunks_and_decodes_take_turns() -> None:
    step = mixed(3)
    step.number = 4
    assert ChunksApart(tokens=64).split(step) == Split(tokens=64, apart=True)
    step.number = 5
    assert ChunksApart(tokens=64).split(step) == Split(tokens=3, prefill=False)
