"""Lets a prompt's known beginning keep its token ids, and learns those of requests that end.

Upstream symbols: ``BaseRenderer._tokenize_prompt``, the one place where text becomes ids, online and offline;
``render_chat``, ``render_cmpl`` and their async twins, where the ``cache_salt`` is known, which goes on with the
parameters of tokenisation; ``OutputProcessor._finish_request``, where prompt and generated ids are together.
Seams tried: ``--tokenizer-mode`` and a tokenizer of our own see texts, but neither salts nor what was generated; a
renderer can be registered, but which class serves a model is decided by its tokenizer, and each would need a copy.
Breaks without: no token memory.
Can go: when vLLM's server remembers the ids of what it generated.

What fails in here never fails a request: it is logged once, and the tokenizer encodes the whole prompt.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from vllm_ext.hooks.feature import Feature
from vllm_ext.hooks.guard import Guard
from vllm_ext.token_memory.attach import ATTRIBUTE

_SALT = "_vllm_ext_salt"
guarded = Guard(
    logging.getLogger("vllm.vllm_ext.token_memory"),
    "the token memory failed; prompts are tokenised whole where it does",
)
_signature = functools.cache(inspect.signature)


def _tokenize_prompt(original: Callable[..., Any], self: Any, prompt: Any, params: Any) -> Any:
    memory, salt = getattr(self, ATTRIBUTE, None), getattr(params, _SALT, None)
    if memory is None or salt is None:  # who came by another way may have a salt that is not known here
        return original(self, prompt, params)
    made: list[Any] = []
    tokenize = functools.partial(original, self)
    guarded(lambda: made.append(memory.tokenize(tokenize, prompt, params, prompt.get("cache_salt") or salt)))
    found = made[0] if made else None
    return original(self, prompt, params) if found is None else found


def _render(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if getattr(self, ATTRIBUTE, None) is None:
        return original(self, *args, **kwargs)
    call = _signature(original).bind(self, *args, **kwargs)
    is_chat = original.__name__.startswith("render_chat")
    default = self.default_chat_tok_params if is_chat else self.default_cmpl_tok_params
    params = copy.copy(call.arguments.get("tok_params") or default)
    object.__setattr__(params, _SALT, (call.arguments.get("prompt_extras") or {}).get("cache_salt") or "")  # frozen
    call.arguments["tok_params"] = params
    return original(*call.args, **call.kwargs)


def _finish_request(original: Callable[..., Any], self: Any, req_state: Any, *args: Any, **kwargs: Any) -> Any:
    ended = getattr(req_state.prompt, "ended", None)
    if ended is not None and req_state.detokenizer is not None:
        guarded(ended, req_state)
    return original(self, req_state, *args, **kwargs)


FEATURE = Feature(
    name="token memory",
    breaks_without="histories are tokenised again, and partly to other ids than were generated",
    remove_when="vLLM's server remembers the ids of what it generated",
    leave_out="--ext-token-memory",
    optional=True,
)
_RENDERER = "vllm.renderers.base:BaseRenderer"
_SALTED = ("render_chat", "render_chat_async", "render_cmpl", "render_cmpl_async")

HOOKS = (
    FEATURE.patch(f"{_RENDERER}._tokenize_prompt", "the one place where a prompt's text becomes ids", _tokenize_prompt),
    *(
        FEATURE.patch(f"{_RENDERER}.{name}", "the cache_salt is known here, and not where ids are made", _render)
        for name in _SALTED
    ),
    FEATURE.patch(
        "vllm.v1.engine.output_processor:OutputProcessor._finish_request",
        "a request's text, prompt ids and generated ids are together when it ends",
        _finish_request,
    ),
)
