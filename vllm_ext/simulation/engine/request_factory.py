"""From a workload's requests to the engine core's, cheaply enough for millions of them."""

from __future__ import annotations

from functools import lru_cache

from vllm.v1.request import Request

from vllm_ext.prediction.oracle import HIDDEN_LENGTH_KEY
from vllm_ext.simulation.engine.cohort_request import CohortRequest
from vllm_ext.simulation.engine.harness import BlockHasher, greedy
from vllm_ext.simulation.workloads import token_ids
from vllm_ext.simulation.workloads.requests import SimRequest


class TooLong(ValueError):
    """The prompt leaves no room for a token; a server answers it with status 400."""


class RequestFactory:
    """Builds what the front end would send to the engine core.

    Args:
        max_model_len: Prompt and output together, in tokens.
        hasher: Of KV blocks, where prefix caching is on.
        reveal_lengths: Put the true output length where the oracle reads it (systems marked ``oracle`` only).
        can_hide: Build requests that a `Cohort` can hide.
    """

    def __init__(
        self, *, max_model_len: int, hasher: BlockHasher | None, reveal_lengths: bool, can_hide: bool = False
    ) -> None:
        self._max_model_len = max_model_len
        self._hasher = hasher
        self._reveal = reveal_lengths
        self._make: type[Request] = CohortRequest if can_hide else Request
        self._count = 0

    def __call__(self, request: SimRequest) -> Request:
        """Return the engine core's request.

        Raises:
            TooLong: the prompt fills the model's context.
            ValueError: the workload gave a length below 1, or another number of token ids than it says.
        """
        if min(request.prompt_tokens, request.output_tokens, request.max_tokens) < 1:
            raise ValueError(
                f"prompt_tokens={request.prompt_tokens}, output_tokens={request.output_tokens}, "
                f"max_tokens={request.max_tokens} of {request.req_id}: must be at least 1"
            )
        room = self._max_model_len - request.prompt_tokens
        if room < 1:
            raise TooLong(
                f"prompt_tokens={request.prompt_tokens} of {request.req_id}: must be below the model's context of "
                f"{self._max_model_len} tokens"
            )
        max_tokens = min(request.max_tokens, room)
        self._count += 1
        extra_args = request.extra_args
        if self._reveal:
            extra_args = {**(extra_args or {}), HIDDEN_LENGTH_KEY: request.output_tokens}
        return self._make(
            request_id=request.req_id,
            prompt_token_ids=self._ids(request),
            sampling_params=greedy(max_tokens, extra_args) if extra_args else _shared_params(max_tokens),
            pooling_params=None,
            arrival_time=request.arrival_s,
            priority=request.priority,
            session_id=request.session_id,
            block_hasher=self._hasher,
        )

    def _ids(self, request: SimRequest) -> list[int]:
        if request.token_ids is None:
            return token_ids.alone(self._count, request.prompt_tokens)
        if len(request.token_ids) != request.prompt_tokens:
            raise ValueError(
                f"token_ids of {request.req_id}: {len(request.token_ids)} of them, but "
                f"prompt_tokens={request.prompt_tokens}"
            )
        return list(request.token_ids)


_shared_params = lru_cache(maxsize=4096)(greedy)
"""For requests that send nothing of their own, so that a million of them share a few."""
