"""What the runtime model predicts from its coefficients: by hand, its laws, and the inverse that budgets use."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.step_time.runtime import DEFAULT, MOST_TOKENS, Coefficients, RuntimeModel, StepFeatures

HAND = Coefficients(base_s=0.01, decode_s=1e-3, prefill_token_s=1e-4, context_token_s=1e-6, pair_s=1e-8)

prices = st.one_of(st.just(0.0), st.floats(1e-12, 1e-1))
models = st.builds(Coefficients, prices, prices, prices, prices, prices).map(RuntimeModel)
counts = st.integers(0, 500)
contexts = st.integers(0, 200_000)
budgets = st.floats(0, 2)


def test_a_step_by_hand() -> None:
    """2 decodes of 1000 and 3000 tokens, and a chunk of 100 of a prompt of which 200 are computed.

    10 ms + 2 * 1 ms + 100 * 0.1 ms + (1000 + 3000 + 300) * 1 us + 100 * 250 * 10 ns
    """
    step = StepFeatures(
        num_decodes=2, num_prefill_tokens=100, num_context_tokens=4300, prefill_context=100 * (200 + 50)
    )
    assert RuntimeModel(HAND).step_time_s(step) == pytest.approx(0.01 + 0.002 + 0.01 + 0.0043 + 0.00025)


def test_a_prefill_by_hand() -> None:
    """ALISE, eq. 4 with T0 = 0.1 ms: 100 tokens; and the pairs of a chunk whose middle has 250 tokens before it."""
    assert RuntimeModel(HAND).prefill_s(100, 200) == pytest.approx(100 * 1e-4 + 100 * 250 * 1e-8)
    assert RuntimeModel(HAND._replace(pair_s=0.0)).prefill_s(100, 200) == pytest.approx(100 * 1e-4)


def test_a_decode_alone_by_hand() -> None:
    """ALISE, eq. 5: n * (alpha * s + beta) with beta the step of one request, s the context half-way."""
    assert RuntimeModel(HAND).decode_s(10, 100) == pytest.approx(10 * (1e-6 * 105 + 0.01 + 1e-3))


def test_a_decode_in_the_batches_seen_by_hand() -> None:
    """Batches of 4 with 4000 tokens: beta has the price of 4 requests and of the 3000 tokens of the other three."""
    model, step = RuntimeModel(HAND), StepFeatures(4, 0, 4000)
    for _ in range(50):
        model.observe(step, model.step_time_s(step))
    assert model.coefficients == pytest.approx(HAND)
    assert model.decode_s(10, 100) == pytest.approx(10 * (1e-6 * 105 + 0.01 + 4 * 1e-3 + 3000 * 1e-6))


def test_batches_without_decodes_do_not_count_as_typical() -> None:
    model = RuntimeModel(HAND)
    before = model.decode_s(10, 100)
    step = StepFeatures(0, 500, 500, 500 * 250)
    for _ in range(50):
        model.observe(step, model.step_time_s(step))
    assert model.decode_s(10, 100) == pytest.approx(before)


@given(models, counts, counts, contexts, contexts, st.sampled_from(StepFeatures._fields))
def test_more_of_anything_never_takes_a_step_less_time(
    model: RuntimeModel, decodes: int, prefill: int, context: int, pairs: int, more: str
) -> None:
    step = StepFeatures(decodes, prefill, context, float(pairs))
    longer = step._replace(**{more: 2 * getattr(step, more) + 1})
    assert 0 <= model.step_time_s(step) <= model.step_time_s(longer) < math.inf


@given(models, counts, contexts)
def test_more_tokens_never_take_a_request_less_time(model: RuntimeModel, tokens: int, context: int) -> None:
    assert 0 <= model.prefill_s(tokens, context) <= model.prefill_s(tokens + 1, context)
    assert model.prefill_s(tokens, context) <= model.prefill_s(tokens, context + 1)
    assert 0 <= model.decode_s(tokens, context) <= model.decode_s(tokens + 1, context)
    assert model.decode_s(tokens, context) <= model.decode_s(tokens, context + 1)


def joined(decodes: int, context: int, computed: int, tokens: int) -> StepFeatures:
    """The step that `largest_prefill` speaks of."""
    return StepFeatures(decodes, tokens, context + computed + tokens, tokens * (computed + tokens / 2))


def test_the_largest_prefill_by_hand() -> None:
    """A step of 100 ms has 84 ms left after 10 ms base, 2 ms for two decodes, and 4 ms for their 4000 tokens.

    800 tokens take 800 * (0.1 ms + 1 us) = 80.8 ms, and their 800 * 400 pairs at 10 ns take 3.2 ms: just as much.
    """
    model = RuntimeModel(HAND)
    assert model.largest_prefill(0.1 + 1e-6, decodes=2, context=4000, computed=0) == 800
    assert model.largest_prefill(0.1 - 1e-6, decodes=2, context=4000, computed=0) == 799


@given(models, budgets, counts, contexts, st.integers(0, 5000), st.integers(0, 300))
def test_the_largest_prefill_is_that_of_a_search_through_all(
    model: RuntimeModel, budget_s: float, decodes: int, context: int, computed: int, at_most: int
) -> None:
    fitting = [n for n in range(1, at_most + 1) if model.step_time_s(joined(decodes, context, computed, n)) <= budget_s]
    found = model.largest_prefill(budget_s, decodes, context, computed, at_most)
    assert found == max(fitting, default=0)


@given(models, budgets, counts, contexts, contexts)
def test_the_largest_prefill_fits_and_one_token_more_does_not(
    model: RuntimeModel, budget_s: float, decodes: int, context: int, computed: int
) -> None:
    found = model.largest_prefill(budget_s, decodes, context, computed)
    assert 0 <= found <= MOST_TOKENS
    if found:
        assert model.step_time_s(joined(decodes, context, computed, found)) <= budget_s
    if found < MOST_TOKENS:
        assert model.step_time_s(joined(decodes, context, computed, found + 1)) > budget_s


@given(models, budgets, budgets, counts, contexts, contexts)
def test_the_largest_prefill_grows_with_the_budget_and_falls_with_the_load(
    model: RuntimeModel, budget_s: float, more_s: float, decodes: int, context: int, computed: int
) -> None:
    found = model.largest_prefill(budget_s, decodes, context, computed)
    assert found <= model.largest_prefill(budget_s + more_s, decodes, context, computed)
    assert found >= model.largest_prefill(budget_s, decodes + 1, context, computed)
    assert found >= model.largest_prefill(budget_s, decodes, context + 1000, computed)
    assert found >= model.largest_prefill(budget_s, decodes, context, computed + 1000)


@pytest.mark.parametrize(
    ("budget_s", "expected"),
    [(-1.0, 0), (math.nan, 0), (0.0, 0), (-math.inf, 0), (math.inf, 64)],
    ids=["negative", "nan", "nothing", "minus infinity", "endless"],
)
def test_a_budget_at_the_edges_gives_a_number_of_tokens(budget_s: float, expected: int) -> None:
    assert RuntimeModel(HAND).largest_prefill(budget_s, 1, 10, 0, at_most=64) == expected


def test_tokens_that_cost_nothing_fit_up_to_the_bound() -> None:
    model = RuntimeModel((0.01, 0, 0, 0, 0))
    assert model.largest_prefill(0.02, 1, 10, 0) == MOST_TOKENS
    assert model.largest_prefill(0.02, 1, 10, 0, at_most=7) == 7
    assert model.largest_prefill(0.005, 1, 10, 0) == 0


@pytest.mark.parametrize(
    "coefficients",
    [(1.0,), (), (1, 2, 3, 4, math.nan), (1, 2, 3, 4, math.inf), (1, 2, 3, 4, -1e-9), ("1", 2, 3, 4, 5), (True,) * 5],
)
def test_coefficients_must_be_five_finite_numbers_of_at_least_0(coefficients: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="five finite numbers of at least 0"):
        RuntimeModel(coefficients)


def test_a_model_that_prices_prompts_at_nothing_still_has_a_pivot_that_takes_time() -> None:
    """Steps of decodes alone are fitted so; a server's budget policy divided by that zero."""
    pivot = RuntimeModel(Coefficients(0.0, 0.01, 0.0, 0.0, 0.0)).pivot
    assert pivot.tokens > 0
    assert pivot.step_s == pytest.approx(pivot.tokens * 1e-9)


def test_given_coefficients_are_the_start() -> None:
    assert RuntimeModel(HAND).coefficients == RuntimeModel(HAND).given == HAND
    assert (RuntimeModel().coefficients, RuntimeModel().given) == (DEFAULT, None)
