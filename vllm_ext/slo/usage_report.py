"""Brings what became of a request's objectives into the ``usage`` of its response, where the client asked for it.

The HTTP handler opens a `Report` and the accounting, which runs where the request enters the engine, puts into it what
is judged. A handler's answer may be streamed from another task than the one that made it, and the engine is first
called there; so a context variable is set in the first by `asked` and in the second by `along`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm_ext.hints import REPORT_KEY

if TYPE_CHECKING:
    from vllm_ext.slo.outcome import SloOutcome

FIELD = "vllm_ext"
"""Name of our object in ``usage``."""
_MS_DIGITS = 3
_PREFIX = "data: "


class Report:
    """What the engine's requests behind one HTTP request saw: one of them, or several where it has several prompts."""

    def __init__(self) -> None:
        self._outcomes: list[SloOutcome] = []

    def add(self, outcome: SloOutcome) -> None:
        """Include a request."""
        self._outcomes.append(outcome)

    def usage(self) -> dict[str, Any] | None:
        """Return the object for the client, of the worst that any sequence saw; None before all have ended."""
        if not self._outcomes or any(outcome.left for outcome in self._outcomes):
            return None
        found: dict[str, Any] = {}
        slo: dict[str, Any] = {}
        for name, key in (("ttft", "ttft_ms"), ("tbt", "max_tbt_ms"), ("jct", "jct_ms")):
            pairs = [outcome.measured[name] for outcome in self._outcomes]
            values = [value_s for value_s, _ in pairs if value_s is not None]
            found[key] = _ms(max(values)) if values else None
            promised = [(value_s or 0.0, objective_s) for value_s, objective_s in pairs if objective_s is not None]
            if promised:  # of several prompts, whose lengths may call for different ones, the one worst off
                _, objective_s = max(promised, key=lambda pair: pair[0] / pair[1])
                outcomes = [outcome.outcomes()[0].get(name) for outcome in self._outcomes]
                slo[name] = {"objective_ms": _ms(objective_s), "met": set(outcomes) <= {"met", None}}
        if slo:
            slo["met"] = all(objective["met"] for objective in slo.values())
        found["slo"] = slo
        found["tier"] = self._outcomes[0].tier
        return found


_report: ContextVar[Report | None] = ContextVar("vllm_ext_slo_report", default=None)


def asked(request: Any) -> Report | None:
    """Return a report for a request of vLLM's HTTP handlers, open in the task at hand; None if it asks for none."""
    given = request.vllm_xargs
    report = Report() if given and given.get(REPORT_KEY) is True else None
    if report is not None or _report.get() is not None:  # a task may handle several requests, one after the other
        _report.set(report)
    return report


def expect(outcome: SloOutcome) -> None:
    """Include a request in the report that is open in the task at hand; offline and elsewhere there is none."""
    report = _report.get()
    if report is not None:
        report.add(outcome)


def along(answer: Any, report: Report | None) -> Any:
    """Return a handler's answer with the report in its usage; a streamed one gets it in the chunk of the usage."""
    if report is None:
        return answer
    if isinstance(answer, AsyncGenerator):
        return _streamed(answer, report)
    usage = getattr(answer, "usage", None)
    # The Responses API has a usage of its own kind, which takes no further fields.
    if hasattr(usage, "completion_tokens") and (found := report.usage()) is not None:
        setattr(usage, FIELD, found)
    return answer


async def _streamed(answer: AsyncGenerator[Any, None], report: Report) -> AsyncGenerator[Any, None]:
    _report.set(report)
    async with aclosing(answer):
        async for chunk in answer:
            yield _with_usage(chunk, report)


def _with_usage(chunk: Any, report: Report) -> Any:
    """Return the chunk, with the report if it is the last one's usage: the only chunk that has it and no choice."""
    if not isinstance(chunk, str) or '"choices":[]' not in chunk or not chunk.startswith(_PREFIX):
        return chunk
    body = json.loads(chunk.removeprefix(_PREFIX))
    usage = body.get("usage")
    if body.get("choices") != [] or not isinstance(usage, dict) or (found := report.usage()) is None:
        return chunk
    usage[FIELD] = found
    return f"{_PREFIX}{json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _ms(seconds: float) -> float:
    return round(seconds * 1000, _MS_DIGITS)
