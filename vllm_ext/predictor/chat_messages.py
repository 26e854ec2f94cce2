"""The chat of the request at hand: handed from the HTTP hook to where the request is predicted.

A request is handled in one task, and its answer may be streamed from another, in which the engine is first called. A
context variable reaches both: `during` sets it in the first, `along` in the second.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

Messages = Sequence[Mapping[str, object]]

_current: ContextVar[Messages | None] = ContextVar("vllm_ext_chat_messages", default=None)
_wanted = False


def want() -> None:
    """Say that there is a predictor in this process; until then nothing is handed over."""
    global _wanted  # noqa: PLW0603 - once in a process
    _wanted = True


def current() -> Messages | None:
    """Return the messages of the chat being handled, as the client sent them; None if it is no chat."""
    return _current.get()


def during(request: Any) -> None:
    """Note what a request of vLLM's HTTP handlers says, for the task at hand."""
    if _wanted:
        _current.set(getattr(request, "messages", None))


def along(answer: Any, request: Any) -> Any:
    """Return a handler's answer so that a streamed one notes what the request said, wherever it is consumed."""
    messages = getattr(request, "messages", None)
    if not _wanted or messages is None or not isinstance(answer, AsyncGenerator):
        return answer
    return _streamed(answer, messages)


async def _streamed(answer: AsyncGenerator[Any, None], messages: Messages) -> AsyncGenerator[Any, None]:
    _current.set(messages)
    async with aclosing(answer):
        async for chunk in answer:
            yield chunk
