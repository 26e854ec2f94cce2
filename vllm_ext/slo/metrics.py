"""Prometheus metrics of service-level objectives, kept by every front end: counters of several API servers add up."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Literal

from prometheus_client import Counter

Outcome = Literal["met", "missed", "aborted"]
OUTCOMES: tuple[Outcome, ...] = ("met", "missed", "aborted")
ALL = "all"
"""Label of the judgement over all objectives of a request."""
MAX_TAGS = 32
"""Tags of clients that get a label of their own in one process; a client must not choose how many series there are."""
OTHER = "other"
"""Tier of the tags beyond."""

_LABELS = ("model_name", "tier")


class _Metrics:
    """The metric objects of this process, and the tags that have become labels."""

    def __init__(self) -> None:
        self.requests = Counter(
            "vllm_ext:slo_requests",
            "Ended requests, by objective (ttft, tbt, jct; all: every one it has) and outcome (met, missed, aborted).",
            (*_LABELS, "objective", "outcome"),
        )
        self.tokens = Counter(
            "vllm_ext:slo_output_tokens",
            "Output tokens of ended requests with objectives, by the outcome of all.",
            (*_LABELS, "outcome"),
        )
        self.shed = Counter(
            "vllm_ext:slo_shed_requests", "Requests answered 503 as their TTFT objective could not be met.", _LABELS
        )
        self.tags: set[str] = set()


@functools.cache
def _metrics() -> _Metrics:
    return _Metrics()


class SloMetrics:
    """The metrics under one model's name."""

    def __init__(self, model_name: str, classes: Collection[str] = ()) -> None:
        """Take the names of the configured classes, each of which is a tier."""
        self._model_name = model_name
        self._classes = frozenset(classes)
        self._metrics = _metrics()
        self._begun: set[tuple[str, str]] = set()

    def tier(self, tag: str | None) -> str:
        """Return the tier of a request by its client's tag; the empty string where there is none."""
        if tag is None:
            return ""
        tags = self._metrics.tags
        if tag in self._classes or tag in tags:
            return tag
        if len(tags) >= MAX_TAGS:
            return OTHER
        tags.add(tag)
        return tag

    def count(self, tier: str, outcomes: Mapping[str, Outcome], overall: Outcome, output_tokens: int) -> None:
        """Count an ended request.

        Args:
            tier: As `tier` returned it.
            outcomes: Of each objective it had: ``ttft``, ``tbt``, ``jct``.
            overall: Of all of them.
            output_tokens: What it generated, over all its sequences.
        """
        labels = {"model_name": self._model_name, "tier": tier}
        for objective, outcome in (*outcomes.items(), (ALL, overall)):
            if (tier, objective) not in self._begun:
                self._begin(labels, tier, objective)
            self._metrics.requests.labels(**labels, objective=objective, outcome=outcome).inc()
        self._metrics.tokens.labels(**labels, outcome=overall).inc(output_tokens)

    def shed(self, tier: str) -> None:
        """Count a request that was refused instead of queued."""
        self._metrics.shed.labels(model_name=self._model_name, tier=tier).inc()

    def _begin(self, labels: dict[str, str], tier: str, objective: str) -> None:
        """Let all outcomes begin at 0: PromQL's ``rate`` doesn't see the step with which a series appears."""
        self._begun.add((tier, objective))
        for outcome in OUTCOMES:
            self._metrics.requests.labels(**labels, objective=objective, outcome=outcome)
            if objective == ALL:
                self._metrics.tokens.labels(**labels, outcome=outcome)
