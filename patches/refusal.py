"""The exception with which a malformed hint leaves our hooks."""

from __future__ import annotations

from collections.abc import Callable

from vllm_ext.hints import HintError


def refusal(error: HintError) -> Exception:
    """Return vLLM's validation error for a hint: HTTP 400 naming the field in a server, a ValueError offline."""
    from vllm.exceptions import VLLMValidationError

    class HintRefused(VLLMValidationError, ValueError):
        """A hint of this request is malformed; the request was not accepted."""

    made: Callable[..., Exception] = HintRefused  # vLLM's first, whose arguments no type checker sees
    return made(str(error), parameter=error.field)
