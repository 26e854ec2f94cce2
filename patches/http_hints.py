"""Collects hints of HTTP requests from headers and body extensions, and answers malformed ones with status 400.

Upstream symbols: ``create_completion``, ``create_chat_completion`` and ``create_responses`` of the OpenAI handlers.
Seams tried: vLLM's request models keep unknown body fields but never pass them on, nor headers except a fixed few;
an endpoint plugin can replace a route, but is loaded only if the user names it in ``VLLM_PLUGINS``, and would copy it.
Breaks without: only ``vllm_xargs`` carries hints; headers and ``nvext`` are ignored.
Can go: when headers or extra body fields reach ``SamplingParams.extra_args``.

The handlers are wrapped outside of their own clean-up of remote KV transfers, so a refusal is passed through it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from vllm_ext import hints
from vllm_ext.hooks.patch import Patch
from vllm_ext.patches.additional_config import options_of, takes_turns_by_key
from vllm_ext.patches.input_hints import refusal
from vllm_ext.predictor import chat_messages
from vllm_ext.slo import misspelt_hints, usage_report


async def _create(
    original: Callable[..., Any], self: Any, request: Any, raw_request: Any = None, *args: Any, **kwargs: Any
) -> Any:
    try:
        found = await add_hints(request, raw_request)
        if found.kv_ttl_s is not None:
            options = options_of(self.engine_client.vllm_config)
            hints.check_lifetime(found, request.cache_salt, options.kv_tier.ttl_s)
    except hints.HintError as error:
        return await self._with_kv_transfer_rejection_cleanup(_raise(refusal(error)), request, raw_request)
    if raw_request is not None and (_announces(request) or takes_turns_by_key(self.engine_client.vllm_config)):
        name_client(request, raw_request)
    # What the user said is told apart from the system prompt by roles, which the rendered prompt has no more.
    chat_messages.during(request)
    report = usage_report.asked(request)
    answer = await original(self, request, raw_request, *args, **kwargs)
    return chat_messages.along(usage_report.along(answer, report), request)


async def add_hints(request: Any, raw_request: Any) -> hints.RequestHints:
    """Put the hints of headers and ``nvext`` into ``request.vllm_xargs``; what the body says there wins.

    A request without such hints is left untouched.

    Returns:
        What the body's ``vllm_xargs`` say by themselves.

    Raises:
        HintError: A hint is malformed; the request is not changed.
    """
    found = {} if raw_request is None else hints.from_headers(raw_request.headers)
    beside = request.model_extra or {}
    found.update(hints.from_body_extension(beside.get("nvext")))
    misspelt_hints.note_outside(beside)
    given = await _as_sent(request.vllm_xargs or {}, raw_request)
    if hints.CLIENT_KEY in given:
        raise hints.HintError(
            hints.CLIENT_KEY, given[hints.CLIENT_KEY], "absent, as the server makes it of the API key"
        )
    said_in_body = hints.from_extra_args(given)
    if found or hints.REPORT_KEY in given:
        request.vllm_xargs = {**found, **given}
    return said_in_body


def _announces(request: Any) -> bool:
    """Whether a request has a hint that is weighed by how right its client was before."""
    return "osl" in (request.vllm_xargs or {})


def name_client(request: Any, raw_request: Any) -> None:
    """Put a hash of the API key into ``request.vllm_xargs``; requests without a key stay as they are."""
    key = raw_request.headers.get("authorization") or raw_request.headers.get("x-api-key")
    if key:
        digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        request.vllm_xargs = {**(request.vllm_xargs or {}), hints.CLIENT_KEY: digest}


async def _as_sent(given: dict[str, Any], raw_request: Any) -> dict[str, Any]:
    """Return the arguments with true and false as they were sent.

    vLLM's request model turns them into 1 and 0; only the raw body, which the server keeps parsed, still tells. Without
    one, as in a batch file, a flag that is 1 or 0 is taken to have been sent as true or false.
    """
    suspects = [key for key in hints.KEYS if key in given and given[key] in (0, 1)]
    if not suspects:
        return given
    if raw_request is None:
        return {**given, **{key: bool(given[key]) for key in suspects if key == hints.REPORT_KEY}}
    body = await raw_request.json()
    sent = body.get("vllm_xargs") if isinstance(body, dict) else None
    return {**given, **{key: sent[key] for key in suspects if key in sent}} if isinstance(sent, dict) else given


async def _raise(error: Exception) -> None:
    raise error


def _patch(target: str) -> Patch:
    return Patch(
        target=target,
        feature="hints",
        why="headers and extra body fields of a request reach nothing that a plugin can see",
        breaks_without="hints in headers and nvext are ignored",
        remove_when="headers or extra body fields reach SamplingParams.extra_args",
        replacement=_create,
    )


_HANDLERS = "vllm.entrypoints.openai"

HOOKS = (
    _patch(f"{_HANDLERS}.completion.serving:OpenAIServingCompletion.create_completion"),
    _patch(f"{_HANDLERS}.chat_completion.serving:OpenAIServingChat.create_chat_completion"),
    _patch(f"{_HANDLERS}.responses.serving:OpenAIServingResponses.create_responses"),
)
