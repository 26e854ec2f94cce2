"""Answers 503 with Retry-After where a request's TTFT objective can't be met; installed only with ``slo.shed``.

Upstream symbols: ``BaseServing._log_inputs``, which the handlers of chats and completions call with the rendered prompt
and the sampling parameters before an answer, streamed or not, is begun: the last place where a status can be chosen,
and the first where the prompt's length is known. (Other handlers call it later, as that of the Responses API does with
each turn of a conversation that was accepted; they are let pass.) And ``exception_handler``, which turns an exception
into an answer without headers. Seams tried: vLLM's own ``check_admission``, on which ``max_num_queued_reqs`` rests, is
told neither prompt nor parameters; the way of its refusals, a ``GracefulHTTPError``, is ours as well.
Breaks without: no load shedding.
Can go: when admission control can be extended, and its refusals carry headers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from vllm_ext.hooks.patch import Patch

if TYPE_CHECKING:
    from vllm_ext.slo.shedding import Refusal

_RETRY_AFTER = "vllm_ext_retry_after_s"
_SERVE = "vllm.entrypoints.serve"


def _log_inputs(
    original: Callable[..., Any], self: Any, request_id: str, inputs: Any, params: Any, *args: Any, **kwargs: Any
) -> None:
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.sampling_params import SamplingParams

    from vllm_ext.slo.shedding import ATTRIBUTE

    handles = isinstance(self, (OpenAIServingChat, OpenAIServingCompletion))
    shedder = getattr(self.engine_client, ATTRIBUTE, None) if handles else None
    if shedder is not None and isinstance(params, SamplingParams):  # a beam search has no tokens that leave singly
        refused = shedder.refusal(params.extra_args, self._extract_prompt_len(inputs), params.n)
        if refused is not None:
            raise shed_error(refused)
    original(self, request_id, inputs, params, *args, **kwargs)


def shed_error(refusal: Refusal) -> Exception:
    """Return vLLM's error of admission control for a refusal: HTTP 503, with the seconds that `_with_header` shows."""
    error: Exception = _error_class()(str(refusal), HTTPStatus.SERVICE_UNAVAILABLE)
    setattr(error, _RETRY_AFTER, refusal.retry_after_s)
    return error


@functools.cache
def _error_class() -> type[Exception]:
    from vllm.exceptions import GracefulHTTPError

    class RequestShed(GracefulHTTPError):
        """The TTFT objective of this request can't be met by the forecast; it was not accepted."""

    return RequestShed


async def _with_header(original: Callable[..., Any], request: Any, error: Exception) -> Any:
    response = await original(request, error)
    seconds = getattr(error, _RETRY_AFTER, None)
    if seconds is not None:
        response.headers["Retry-After"] = str(seconds)
    return response


HOOKS = (
    Patch(
        target=f"{_SERVE}.engine.serving:BaseServing._log_inputs",
        feature="load shedding",
        why="admission control is told neither the prompt's length nor the hints",
        breaks_without="requests queue although their objective can't be met",
        remove_when="admission control can be extended",
        replacement=_log_inputs,
        leave_out="--ext-shed",
        optional=True,
    ),
    Patch(
        target=f"{_SERVE}.exception_handling.handlers.exception:exception_handler",
        feature="load shedding",
        why="an exception's answer has no headers",
        breaks_without="refusals don't say when to try again",
        remove_when="refusals of admission control carry headers",
        replacement=_with_header,
        also_rebind=(
            f"{_SERVE}.exception_handling.handlers.vllm_error:exception_handler",
            f"{_SERVE}.exception_handling.register:exception_handler",
        ),
        leave_out="--ext-shed",
        optional=True,
    ),
)
