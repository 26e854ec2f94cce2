"""From a workload's requests to the engine core's, cheaply enough for millions of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from vllm_ext.prediction.oracle import HIDDEN_LENGTH_KEY
from vllm_ext.simulation.cohort_request import CohortRequest
from vllm_ext.simulation.harness import BlockHasher
from vllm_ext.simulation.requests import SimRequest
from vllm_ext.simulation.token_runner import EOS_TOKEN_ID

_FIRST_ID = 100
_DIGIT = 3900
_FILLER_ID = 50
_CACHED_PARAMS = 4096


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
        self._params: dict[int, SamplingParams] = {}
        self._count = 0
        self._filler = [_FILLER_ID] * max_model_len

    def __call__(self, request: SimRequest) -> Request:
        """Return the engine core's request.

        Raises:
            TooLong: the prompt fills the model's context.
            ValueError: the workload gave a length below 1, or another number of token ids than it says.
        """
        if request.prompt_tokens < 1 or request.output_tokens < 1 or request.max_tokens < 1:
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
        self._count += 1
        extra_args = request.extra_args
        if self._reveal:
            extra_args = {**(extra_args or {}), HIDDEN_LENGTH_KEY: request.output_tokens}
        return self._make(
            request_id=request.req_id,
            prompt_token_ids=self._ids(request),
            sampling_params=self._sampling_params(min(request.max_tokens, room), extra_args),
            pooling_params=None,
            arrival_time=request.arrival_s,
            priority=request.priority,
            session_id=request.session_id,
            block_hasher=self._hasher,
        )

    def _ids(self, request: SimRequest) -> list[int]:
        if request.token_ids is not None:
            ids: Sequence[int] = request.token_ids
            if len(ids) != request.prompt_tokens:
                raise ValueError(
                    f"token_ids of {request.req_id}: {len(ids)} of them, but prompt_tokens={request.prompt_tokens}"
                )
            return list(ids)
        made_up = self._filler[: request.prompt_tokens]
        if self._hasher is not None:  # the first ids count the requests, so that no block is like another's
            number = self._count
            for place in range(min(3, len(made_up))):
                number, digit = divmod(number, _DIGIT)
                made_up[place] = _FIRST_ID + digit
        return made_up

    def _sampling_params(self, max_tokens: int, extra_args: Mapping[str, Any] | None) -> SamplingParams:
        if extra_args is not None:
            return _make_params(max_tokens, dict(extra_args))
        params = self._params.get(max_tokens)
        if params is None:
            if len(self._params) >= _CACHED_PARAMS:
                self._params.clear()
            params = self._params[max_tokens] = _make_params(max_tokens, None)
        return params


def _make_params(max_tokens: int, extra_args: dict[str, Any] | None) -> SamplingParams:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, extra_args=extra_args)
    params.update_from_generation_config({}, EOS_TOKEN_ID)
    return params
