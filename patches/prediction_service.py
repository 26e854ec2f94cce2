"""Joins the length predictor to the front end: new requests, ended ones, and the way of its hints to the scheduler.

Upstream symbols: ``OutputProcessor.add_request``, ``_update_stats_from_finished`` and ``abort_requests``, through which
each request and each of n samples passes, online and offline; ``LLMEngine.add_request``, where the service starts
offline (a server's starts with its event loop: ``output_handler``); ``LLMEngine.step``, after which offline answers are
sent. Seams tried: the prompt's text never reaches the engine core; a logits processor sees no text; stat-logger plugins
see neither requests nor the engine client.
Breaks without: lengths are predicted from hints and history only (source ``retrieval``).
Can go: when a front-end plugin sees requests with their text, and can speak to the scheduler.

What fails in here never fails a request: it is logged once, and the request goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm_ext import hints
from vllm_ext.hooks.guard import Guard
from vllm_ext.hooks.patch import Hook, Patch

guarded = Guard(
    logging.getLogger("vllm.vllm_ext.predictor"),
    "length prediction failed in the front end; requests are scheduled without it",
)


def _add_request(original: Callable[..., Any], self: Any, request: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
    is_new = request.request_id not in self.request_states  # else more input of a streaming session
    result = original(self, request, prompt, *args, **kwargs)
    from vllm_ext.predictor.attach import attached

    if is_new and request.sampling_params is not None and (found := attached(self)) is not None:
        guarded(_ask, found, request, prompt, self.tokenizer)
    return result


def _ask(found: Any, request: Any, prompt: Any, tokenizer: Any) -> None:
    params = request.sampling_params
    try:
        hinted = hints.from_extra_args(params.extra_args, request.session_id)
    except hints.HintError:  # the scheduler reports it
        hinted = hints.NO_HINTS
    found.asked(request, prompt, tokenizer, hinted, params.max_tokens or 1)


def _update_stats_from_finished(
    original: Callable[..., Any], self: Any, req_state: Any, finish_reason: Any, *args: Any, **kwargs: Any
) -> Any:
    from vllm_ext.predictor.attach import attached

    if (found := attached(self)) is not None:
        guarded(found.ended, req_state, str(finish_reason))
    return original(self, req_state, finish_reason, *args, **kwargs)


def _abort_requests(
    original: Callable[..., Any], self: Any, request_ids: Any, internal: bool, *args: Any, **kwargs: Any
) -> Any:
    from vllm_ext.predictor.attach import attached

    if (found := attached(self)) is None:
        return original(self, request_ids, internal, *args, **kwargs)
    request_ids = list(request_ids)
    # Samples of a request are aborted by a call of their own, which passes here as well.
    known = request_ids if internal else [own for each in request_ids for own in self.external_req_ids.get(each, ())]
    states = [self.request_states[each] for each in known if each in self.request_states]
    result = original(self, request_ids, internal, *args, **kwargs)
    for state in states:
        guarded(found.ended, state, "abort")
    return result


def _offline_add_request(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm_ext.predictor.attach import attach_offline

    guarded(attach_offline, self)
    return original(self, *args, **kwargs)


def _step(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    from vllm_ext.predictor.attach import deliver_offline

    guarded(deliver_offline, self)
    return result


def _patch(target: str, why: str, replacement: Callable[..., Any]) -> Patch:
    return Patch(
        target=target,
        feature="prediction",
        why=why,
        breaks_without="output lengths are predicted from hints and history only",
        remove_when="a front-end plugin sees requests with their text, and can speak to the scheduler",
        replacement=replacement,
        leave_out="retrieval from --ext-prediction-sources",
    )


_ENGINE = "vllm.v1.engine"

HOOKS: tuple[Hook, ...] = (
    _patch(
        f"{_ENGINE}.output_processor:OutputProcessor.add_request",
        "the one place where every request passes with its text and its final id",
        _add_request,
    ),
    _patch(
        f"{_ENGINE}.output_processor:OutputProcessor._update_stats_from_finished",
        "the one place where every request passes when it ends, stop strings included",
        _update_stats_from_finished,
    ),
    _patch(
        f"{_ENGINE}.output_processor:OutputProcessor.abort_requests",
        "the one place where requests pass that their clients give up",
        _abort_requests,
    ),
    _patch(
        f"{_ENGINE}.llm_engine:LLMEngine.add_request",
        "offline, the service starts with the first request",
        _offline_add_request,
    ),
    _patch(
        f"{_ENGINE}.llm_engine:LLMEngine.step",
        "offline, there is no event loop: answers are sent between steps",
        _step,
    ),
)
