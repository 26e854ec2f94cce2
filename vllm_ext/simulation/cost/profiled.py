"""A profile of simulated hardware: what `vllm-ext profile` would measure there, without running its loads.

Its loads become steps, whose times the cost model tells; the fit is the same. Like the engine that is profiled, steps
are synchronous: the host's time counts in full.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from vllm_ext.simulation.cost.roofline import pivot_tokens
from vllm_ext.simulation.cost.step_shape import CostModel, StepShape
from vllm_ext.simulation.spec import Limits
from vllm_ext.step_time.fit import Fit, fit
from vllm_ext.step_time.profile_loads import MAX_BATCH_TOKENS, OUTPUT_TOKENS, SHORTEST_PROMPT, longest_prompt, plan
from vllm_ext.step_time.runtime import DEFAULT_TILE_TOKENS, Pivot, RuntimeModel, StepFeatures


def runtime_model(cost: CostModel, limits: Limits, tile_tokens: int = DEFAULT_TILE_TOKENS) -> RuntimeModel:
    """Return a runtime model that starts from a profile of the hardware, pivot included; it has seen no step yet.

    Takes some 10 ms, a small part of what any run takes.

    The pivot is a property of the hardware (AccelGen, section 4.2), found on one fresh prompt: the engine's own largest
    step does not bound it.

    Args:
        cost: How long steps take.
        limits: The engine's.
        tile_tokens: Of the device's matrix products, along the tokens.

    Raises:
        ValueError: the engine is too small for a profile: fewer than 50 different steps.
    """
    try:
        found = profile(cost, limits)
    except ValueError as error:
        raise ValueError(f"profiled=True: the engine is too small for it ({limits}): {error}") from error
    tokens = pivot_tokens(cost)
    pivot = Pivot(tokens, _step_s(cost, StepShape.of_chunk(tokens)))
    return RuntimeModel(found.coefficients, pivot, tile_tokens=tile_tokens)


def profile(cost: CostModel, limits: Limits) -> Fit:
    """Return the fit to the steps that a cost model prices.

    Raises:
        ValueError: fewer than 50 steps.
    """
    return fit([(features_of(shape), _step_s(cost, shape)) for shape in shapes(limits)])


def features_of(shape: StepShape) -> StepFeatures:
    """Return a step as the runtime model sees it; prefill rows are chunks of more than one token.

    A shape counts half a token's diagonal more per token of a chunk than `StepFeatures` does.
    """
    return StepFeatures(
        shape.num_decodes,
        shape.num_prefill_tokens,
        shape.decode_context_tokens + shape.prefill_context_tokens,
        shape.prefill_pairs - shape.num_prefill_tokens / 2,
    )


def shapes(limits: Limits) -> Iterator[StepShape]:
    """Yield the steps of a profile's loads: decodes, whole prompts in chunks, and decodes together with a chunk."""
    longest = longest_prompt(limits.max_model_len)
    for load in plan(limits.max_model_len, limits.max_num_seqs):
        if load.kind == "decode":
            for generated in range(1, OUTPUT_TOKENS + 1):
                yield StepShape.of_decodes(load.batch, load.prompt_tokens + generated)
        elif load.kind == "prefill":
            yield from _prompt(load.prompt_tokens, limits.max_num_batched_tokens)
        else:
            yield from _mixed(load.batch, longest, limits.max_num_batched_tokens)


def _prompt(tokens: int, budget: int) -> Iterator[StepShape]:
    """The chunks of a prompt; a last one of a single token would be a decode to the runtime model, and is left out."""
    for held in range(0, tokens, budget):
        size = min(budget, tokens - held)
        if size > 1:
            yield StepShape.of_chunk(size, held, sampled=held + size == tokens)


def _mixed(batch: int, longest: int, budget: int) -> Iterator[StepShape]:
    """``batch`` requests of which one is prefilled: prompts of all lengths, beside decodes of a middling context."""
    most = min(longest, max(SHORTEST_PROMPT, MAX_BATCH_TOKENS // batch))
    decodes = batch - 1
    context = math.isqrt(SHORTEST_PROMPT * most) + OUTPUT_TOKENS // 2
    tokens = most
    while tokens >= SHORTEST_PROMPT:
        for chunk in _prompt(tokens, max(2, budget - decodes)):
            yield chunk.plus(StepShape.of_decodes(decodes, context))
        tokens //= 2


def _step_s(cost: CostModel, shape: StepShape) -> float:
    return cost.device_s(shape) + cost.host_s(shape)
