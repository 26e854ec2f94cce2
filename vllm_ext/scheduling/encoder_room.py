"""Images, and what else an encoder embeds: what a step has left to compute of them and to keep.

vLLM computes an encoder input as a whole, in the step that reaches it, and ends its look at the queue at the first
request whose next one does not fit: whoever a plan names behind it waits, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_ext.contract import Candidate, Demand, Victim
    from vllm_ext.kv.connector.cached_prefixes import CachedPrefixes
    from vllm_ext.scheduling.engine_state import EngineState

ENCODER = "encoder"
"""Why somebody does not fit."""


class EncoderRoom:
    """A gate that refuses those who could not begin, as their next encoder input does not fit.

    Counts are in embeddings. One that reaches its input only behind some text joins all the same: vLLM cuts its chunk
    there.
    """

    name = ENCODER
    closed = False

    def __init__(self, engine: EngineState, prefilling: Sequence[Request], prefixes: CachedPrefixes) -> None:
        """Count what running prompts leave.

        Args:
            engine: vLLM's scheduler.
            prefilling: Its unfinished prompts.
            prefixes: Knows what of a waiting request needs no computing.
        """
        cache = engine.encoder_cache_manager
        self._engine, self._prefixes, self._cached = engine, prefixes, cache.cached
        self._compute: int = engine.max_num_encoder_input_tokens
        self._kept: int = cache.num_freeable_slots
        self._taken: set[str] = set()
        for request in prefilling:
            self._take(request, request.num_computed_tokens, request.num_tokens - request.num_computed_tokens)

    def fits(self, candidate: Candidate, demand: Demand, leaving: Sequence[Victim]) -> bool:  # noqa: ARG002 - a gate
        """Say whether it can begin; nobody who leaves makes room."""
        request = self._engine.requests[candidate.req_id]
        if not request.has_encoder_inputs or demand.loads:
            return True
        computed = self._prefixes.of(request).ready_tokens
        first = next(self._missing(request, computed, 1), None)
        return first is None or self._has_room(first)

    def take(self, candidate: Candidate, demand: Demand, leaving: Sequence[Victim]) -> None:  # noqa: ARG002 - a gate
        """Take note of what it will have embedded."""
        request = self._engine.requests[candidate.req_id]
        if request.has_encoder_inputs and not demand.loads:
            self._take(request, self._prefixes.of(request).ready_tokens, demand.tokens)

    def _take(self, request: Request, computed: int, tokens: int) -> None:
        for feature in self._missing(request, computed, min(tokens, self._engine.max_num_scheduled_tokens)):
            if not self._has_room(feature):
                break
            embeddings = feature.mm_position.get_num_embeds()
            self._compute -= embeddings
            self._kept -= embeddings
            self._taken.add(feature.identifier)

    def _has_room(self, feature: Any) -> bool:
        return bool(feature.mm_position.get_num_embeds() <= min(self._compute, self._kept))

    def _missing(self, request: Request, computed: int, tokens: int) -> Iterator[Any]:
        """Yield the encoder inputs that so many tokens reach and that are not there, nor will be by then."""
        for feature in request.mm_features:
            start = feature.mm_position.offset
            if start >= computed + tokens:
                return
            there = feature.identifier in self._cached or feature.identifier in self._taken
            if start + feature.mm_position.length > computed and not there:
                yield feature


def has_encoder(engine: EngineState) -> bool:
    """Whether prompts of this model may hold what is embedded when they are computed that far."""
    return bool(engine.max_num_encoder_input_tokens) and not engine.is_encoder_decoder
