"""What the client of the request at hand said: handed from the HTTP hook to where the request is predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar

said: ContextVar[Sequence[Mapping[str, object]] | None] = ContextVar("vllm_ext_said", default=None)
"""Messages of the chat request being handled, as the client sent them; None if it is no chat."""
