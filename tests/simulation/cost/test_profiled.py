"""A profile of simulated hardware: the fit finds the prices again, and the pivot is the roofline's."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from vllm_ext.simulation.cost.fitted import Fitted, StepCurve
from vllm_ext.simulation.cost.profiled import Limits, features_of, profile, runtime_model, shapes
from vllm_ext.simulation.cost.roofline import pivot_tokens
from vllm_ext.simulation.cost.spec import CostSpec, HardwareSpec, build
from vllm_ext.simulation.cost.step_shape import CostModel, StepShape
from vllm_ext.step_time.runtime import Coefficients, StepFeatures

LIMITS = Limits(max_model_len=4096, max_num_seqs=128, max_num_batched_tokens=2048)
PRICES = Coefficients(base_s=4e-3, decode_s=3e-5, prefill_token_s=6e-5, context_token_s=8e-8, pair_s=2e-9)


def opt_13b() -> CostModel:
    return build(HardwareSpec(model="opt-13b", device="a100-80").resolve(), CostSpec())


def test_features_of_a_step_by_hand() -> None:
    """Two decodes at 101 and 51 tokens, and a chunk of 10 after 20: it ends at 30, its middle is at 25."""
    shape = StepShape(3, 12, 2, 2, 152, 30, 10 * (20 + 11 / 2))
    assert features_of(shape) == StepFeatures(2, 10, 152 + 30, 10 * 25.0)


def test_a_cost_model_that_the_runtime_model_can_express_is_found_exactly() -> None:
    curve = StepCurve(
        base_s=PRICES.base_s,
        per_decode=PRICES.decode_s,
        per_chunk_token=PRICES.prefill_token_s - PRICES.pair_s / 2,  # its pairs have half a token's diagonal more
        per_decode_context=PRICES.context_token_s,
        per_prefill_context=PRICES.context_token_s,
        per_pair=PRICES.pair_s,
    )
    found = profile(Fitted(curve, host_step_s=1e-3), LIMITS)
    assert found.coefficients == pytest.approx(PRICES._replace(base_s=PRICES.base_s + 1e-3), rel=1e-6)
    assert all(term.determined for term in found.terms)


def test_steps_span_what_a_profile_spans() -> None:
    steps = list(shapes(LIMITS))
    decodes = [s for s in steps if not s.num_prefill_tokens]
    mixed = [s for s in steps if s.num_prefill_tokens and s.num_decodes]
    assert {s.num_decodes for s in decodes} == {1, 2, 4, 8, 16, 32, 64, 128}
    assert max(s.num_prefill_tokens for s in steps if not s.num_decodes) == LIMITS.max_num_batched_tokens
    assert max(s.prefill_context_tokens for s in steps) == 4096 - 25
    assert {s.num_requests for s in mixed} == {2, 4, 8, 16, 32, 64, 128}


@pytest.mark.parametrize(
    "limits", [LIMITS, Limits(160, 8, 64), Limits(64, 1, 8192), Limits(131_072, 256, 512), Limits(2048, 1024, 2048)]
)
def test_every_step_is_one_that_the_engine_could_take(limits: Limits) -> None:
    for step in shapes(limits):
        assert 1 <= step.num_requests <= limits.max_num_seqs
        assert step.num_tokens <= max(limits.max_num_batched_tokens, limits.max_num_seqs + 1)
        assert step.num_prefill_tokens != 1, "to the runtime model it would be a decode"
        assert step.decode_context_tokens <= step.num_decodes * limits.max_model_len
        assert step.prefill_context_tokens < limits.max_model_len
        assert step.num_decodes <= step.num_requests


def test_the_model_tells_steps_of_its_hardware_before_it_has_seen_one() -> None:
    """Straight lines beside a roofline: a tenth off in the median, where defaults for another model are far off."""
    cost = opt_13b()
    model = runtime_model(cost, LIMITS)
    assert model.num_observations == 0
    rng = np.random.default_rng(3)
    errors = []
    for _ in range(300):
        batch, context = int(rng.integers(1, 100)), int(rng.integers(100, 2000))
        chunk, held = int(rng.integers(32, 1900)), int(rng.integers(0, 2000))
        shape = StepShape.of_chunk(chunk, held).plus(StepShape.of_decodes(batch, context))
        actual = cost.device_s(shape) + cost.host_s(shape)
        errors.append(abs(model.step_time_s(features_of(shape)) / actual - 1))
    assert np.median(errors) < 0.1


def test_the_pivot_is_the_rooflines_and_its_time_that_of_one_fresh_prompt() -> None:
    cost = opt_13b()
    tokens, step_s = runtime_model(cost, LIMITS).pivot
    assert tokens == pivot_tokens(cost)
    shape = StepShape.of_chunk(tokens)
    assert step_s == cost.device_s(shape) + cost.host_s(shape)


def test_the_engines_largest_step_does_not_move_the_pivot() -> None:
    small = LIMITS._replace(max_num_batched_tokens=256)
    assert runtime_model(opt_13b(), small).pivot == runtime_model(opt_13b(), LIMITS).pivot


def test_steps_that_all_take_the_same_cost_nothing_but_their_base() -> None:
    found = profile(Fitted.constant(0.02), LIMITS).coefficients
    assert found.base_s == pytest.approx(0.02)
    assert found[1:] == pytest.approx((0, 0, 0, 0), abs=1e-9)


def test_more_hardware_is_never_slower() -> None:
    batches = [
        build(HardwareSpec(model="llama-3.1-70b", device="h100", tensor_parallel=split).resolve(), CostSpec())
        for split in (4, 8)
    ]
    times = [runtime_model(cost, LIMITS).step_time_s(StepFeatures(32, 512, 40_000, 2e5)) for cost in batches]
    assert all(more < fewer for fewer, more in pairwise(times))


def test_an_engine_that_is_too_small_is_named() -> None:
    with pytest.raises(ValueError, match=r"profiled=True: .*max_model_len=8.*at least 50 are needed"):
        runtime_model(opt_13b(), Limits(8, 1, 8))
