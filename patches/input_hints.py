"""Validates hints of requests that do not come over HTTP, and those that reach the engine by another way.

Upstream symbol: ``InputProcessor.process_inputs``, through which every request passes in the front-end process. Seams
tried: a logits processor's ``validate_params`` sees every request too, but one entry point can't serve both of vLLM's
runners and it is absent under speculative decoding; in the scheduler an error would hit the engine, not the caller.
Breaks without: a malformed hint given to ``LLM.generate`` is first seen in the engine core and can only be ignored.
Can go: when a plugin can validate requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm_ext import hints
from vllm_ext.hooks.patch import Patch
from vllm_ext.patches.additional_config import options_of
from vllm_ext.slo import misspelt_hints


def refusal(error: hints.HintError) -> Exception:
    """Return vLLM's validation error for a hint: HTTP 400 naming the field in a server, a ValueError offline."""
    from vllm.exceptions import VLLMValidationError

    class HintRefused(VLLMValidationError, ValueError):
        """A hint of this request is malformed; the request was not accepted."""

    made: Callable[..., Exception] = HintRefused  # vLLM's first, whose arguments no type checker sees
    return made(str(error), parameter=error.field)


def _process_inputs(
    original: Callable[..., Any], self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    session_id = kwargs.get("session_id")
    extra = getattr(params, "extra_args", None)
    if extra or session_id is not None:
        try:
            found = hints.from_extra_args(extra, session_id)
            if extra:
                misspelt_hints.note(extra)
            options = options_of(self.vllm_config)
            options.slo.check(found)
            if found.kv_ttl_s is not None:
                salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
                hints.check_lifetime(found, salt, options.kv_tier.ttl_s)
        except hints.HintError as error:
            raise refusal(error) from error
    return original(self, request_id, prompt, params, *args, **kwargs)


HOOKS = (
    Patch(
        target="vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        feature="hints",
        why="no seam sees every request in the front end on both of vLLM's model runners",
        breaks_without="malformed hints of offline requests are ignored instead of refused",
        remove_when="a plugin can validate requests",
        replacement=_process_inputs,
    ),
)
