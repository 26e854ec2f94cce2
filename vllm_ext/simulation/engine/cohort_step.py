"""What a step of a `Cohort` is made of: what vLLM was told, and what it wasn't."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_ext.simulation.cost.step_shape import StepShape
from vllm_ext.simulation.engine.token_runner import FILLER_TOKEN_ID
from vllm_ext.simulation.measure.run_data import Decision

_FILLER = [FILLER_TOKEN_ID]


class Launch(NamedTuple):
    """What vLLM's output of a step does not say."""

    step: int
    shown: Mapping[str, int]
    """Tokens by request, of those that vLLM was told of."""
    running: list[Request]
    """All who ran after the step was scheduled, in their order."""
    hidden: int
    context_tokens: int
    """Of the hidden, the tokens of this step included."""

    def decision(self, output: Any, hidden: Container[str]) -> Decision:
        """Return what the step decided, as if nobody had been hidden.

        Args:
            output: Its output, from vLLM or not.
            hidden: Ids of the hidden, as they were when it was scheduled.
        """
        seen = Decision.of(output, self.shown)
        computed = dict(zip((req_id for req_id, _ in seen.scheduled), seen.num_computed_tokens, strict=True))
        in_order = {}
        for request in self.running:
            req_id = request.request_id
            if req_id in self.shown:
                in_order[req_id] = self.shown[req_id], computed[req_id]
            elif req_id in hidden:
                in_order[req_id] = 1, request.num_computed_tokens - 1
        return replace(
            seen,
            scheduled=tuple((req_id, tokens) for req_id, (tokens, _) in in_order.items()),
            num_computed_tokens=tuple(before for _, before in in_order.values()),
        )

    def shape(self, shown: StepShape) -> StepShape:
        """Return the shape of the whole step, ``shown`` being that of those who are not hidden."""
        hidden = self.hidden
        requests, tokens, decodes, sampled, decode_context, prefill_context, pairs = shown
        return StepShape(
            requests + hidden,
            tokens + hidden,
            decodes + hidden,
            sampled + hidden,
            decode_context + self.context_tokens,
            prefill_context,
            pairs,
        )


class _NobodyCached(NamedTuple):
    req_ids: tuple[str, ...] = ()
    new_block_ids: tuple[None, ...] = ()
    resumed_req_ids: frozenset[str] = frozenset()
    num_computed_tokens: tuple[int, ...] = ()


class QuietOutput:
    """Stands for vLLM's output of a step that vLLM was not asked for: one token of each hidden request."""

    scheduled_new_reqs: ClassVar[tuple[Any, ...]] = ()
    scheduled_cached_reqs: ClassVar[_NobodyCached] = _NobodyCached()
    scheduled_spec_decode_tokens: ClassVar[dict[str, Any]] = {}
    kv_cache_block_copies: ClassVar[None] = None
    kv_connector_block_state: ClassVar[None] = None
    __slots__ = (
        "finished_req_ids",
        "kv_connector_metadata",
        "launch",
        "num_scheduled_tokens",
        "preempted_req_ids",
        "total_num_scheduled_tokens",
    )

    launch: Launch
    kv_connector_metadata: Any

    def __init__(self, tokens: dict[str, int], finished: set[str], preempted: set[str]) -> None:
        self.num_scheduled_tokens = tokens
        self.total_num_scheduled_tokens = len(tokens)
        self.finished_req_ids = finished
        self.preempted_req_ids = preempted


@contextmanager
def limits_less(engine: Any, hidden: int) -> Iterator[None]:
    """Let vLLM's scheduler have fewer tokens and seats for a while, as many as there are hidden requests."""
    config = engine.scheduler_config
    limits = (
        engine.max_num_scheduled_tokens,
        engine.max_num_active_reqs,
        engine.max_num_running_reqs,
        config.max_num_batched_tokens,
    )
    _limit(engine, *(limit - hidden for limit in limits))
    try:
        yield
    finally:
        _limit(engine, *limits)


def _limit(engine: Any, tokens: int, active: int, running: int, batched: int) -> None:
    engine.max_num_scheduled_tokens = tokens
    engine.max_num_active_reqs = active
    engine.max_num_running_reqs = running
    engine.scheduler_config.max_num_batched_tokens = batched


def most_blocks(request: Request, token_budget: int, block_size: int) -> int:
    """Return the most KV blocks that a running request could take in a step."""
    if not request.is_prefill_chunk:
        return 1
    left = min(request.num_tokens - request.num_computed_tokens, token_budget)
    blocks: int = left // block_size + 2
    return blocks


def merged(everybody: list[Request], shown: list[Request], after: list[Request]) -> list[Request]:
    """Return who runs after a step, in the order in which they run, if ``after`` is what became of those shown."""
    if after[: len(shown)] == shown:
        return everybody + after[len(shown) :]
    left = set(shown).difference(after)
    joined = set(shown)
    kept = [request for request in everybody if request not in left]
    return kept + [request for request in after if request not in joined]


def together(
    launch: Launch, tokens: Mapping[str, int], late: set[str], output: ModelRunnerOutput
) -> tuple[dict[str, int], ModelRunnerOutput]:
    """Return a step's tokens and output with those who were hidden in it and are shown by now, in their order."""
    in_order = [request.request_id for request in launch.running]
    together = {req_id: tokens.get(req_id, 1) for req_id in in_order if req_id in late or req_id in tokens}
    sampled = [  # who was hidden was shown before the step that may end it
        _FILLER if req_id in late else output.sampled_token_ids[output.req_id_to_index[req_id]] for req_id in together
    ]
    places = {req_id: place for place, req_id in enumerate(together)}
    return together, replace(output, req_ids=list(together), req_id_to_index=places, sampled_token_ids=sampled)
