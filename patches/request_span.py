"""Says on vLLM's span of a request why it waited.

Upstream symbol: ``OutputProcessor.do_tracing``, which makes the span of a finished request. Seams tried: a span
processor may set attributes, and ours does, but it is not told whose span it is; the scheduler's process can't reach
spans, and hands over what it knows among the request's trace headers, which vLLM returns with each output.
Breaks without: spans have vLLM's own attributes only.
Can go: when a scheduler can add attributes to the span of a request.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from vllm_ext.hooks.guard import Guard
from vllm_ext.hooks.patch import Patch
from vllm_ext.scheduling.wait_reasons import TRACE_HEADER

PREFIX = "vllm_ext.wait."
guarded = Guard(logging.getLogger("vllm.vllm_ext.tracing"), "traces of requests lack the reason for a wait")
_attributes: ContextVar[Mapping[str, Any] | None] = ContextVar("vllm_ext_span_attributes", default=None)
_MARK = "_vllm_ext_processor"


def _do_tracing(original: Callable[..., Any], self: Any, output: Any, *args: Any, **kwargs: Any) -> None:
    headers = dict(output.trace_headers or {})
    told = headers.pop(TRACE_HEADER, None)
    if told is None:
        original(self, output, *args, **kwargs)
        return
    output.trace_headers = headers or None  # where the client sent none, vLLM must find none
    token = _attributes.set(None)
    guarded(_prepare, told)
    try:
        original(self, output, *args, **kwargs)
    finally:
        _attributes.reset(token)


def _prepare(told: str) -> None:
    _hear_of_spans()
    _attributes.set(flat(json.loads(told)))


def flat(told: Mapping[str, Any], prefix: str = PREFIX) -> dict[str, Any]:
    """Return what `WaitReasons.told` says as attributes of a span; what is not known has none."""
    found: dict[str, Any] = {}
    for name, value in told.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif value is not None:
            found[prefix + name] = value
    return found


def _hear_of_spans() -> None:
    """Have the tracer tell us of spans that begin; once for each, as a process may be given another."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import SpanProcessor

    class Processor(SpanProcessor):
        def on_start(self, span: Any, parent_context: Any = None) -> None:  # noqa: ARG002 - theirs
            if (found := _attributes.get()) is not None:
                guarded(span.set_attributes, found)

    provider: Any = trace.get_tracer_provider()
    if not hasattr(provider, _MARK):
        setattr(provider, _MARK, True)
        provider.add_span_processor(Processor())


HOOKS = (
    Patch(
        target="vllm.v1.engine.output_processor:OutputProcessor.do_tracing",
        feature="tracing",
        why="the one place where the span of a request and its last output are together",
        breaks_without="traces of requests lack the reason for a wait",
        remove_when="a scheduler can add attributes to the span of a request",
        replacement=_do_tracing,
        leave_out="--otlp-traces-endpoint",
        optional=True,
    ),
)
