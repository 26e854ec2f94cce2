"""Prometheus metrics of the length predictor, kept by every front end: counters of several API servers add up."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from vllm_ext.predictor.messages import Status

_LABELS = ("model_name",)
_LATENCY_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class _Metrics:
    """The metric objects of this process."""

    def __init__(self) -> None:
        self.outcomes = Counter(
            "vllm_ext:length_predictions",
            "Requests by their prediction: predicted, unknown, late (they had ended); expired, overload, "
            "not-ready (no time, no room, no process); error, timeout, lost (the predictor failed).",
            (*_LABELS, "outcome"),
        )
        self.dropped = Counter(
            "vllm_ext:predictor_dropped",
            "What did not reach the predictor: finished requests, which are not learned, and bad messages.",
            (*_LABELS, "what"),
        )
        self.latency = Histogram(
            "vllm_ext:length_prediction_seconds",
            "From asking the predictor to its answer.",
            _LABELS,
            buckets=_LATENCY_BUCKETS,
        )
        self.starts = Counter("vllm_ext:predictor_starts", "Starts of the predictor's process.", _LABELS)
        self.up = self._gauge("predictor_up", "1 while the predictor is ready.")
        self.gauges = {
            "entries": self._gauge("predictor_entries", "Finished requests that the predictor remembers."),
            "learned": self._gauge("predictor_learned", "Requests learned since the predictor's process started."),
            "waiting": self._gauge("predictor_queue", "Prompts that wait for their prediction."),
            "errors": self._gauge("predictor_errors", "Times the predictor failed since its process started."),
            "examples": self._gauge("predictor_examples", "Finished requests the regression was fitted on."),
            "coverage": self._gauge("predictor_p90_coverage", "Share of recent requests that ended within their P90."),
            "relative_error": self._gauge(
                "predictor_relative_error", "Median of |predicted - true| / true over recent requests."
            ),
            "tau": self._gauge("predictor_kendall_tau", "Kendall's tau of recent lengths: 1 in order, 0 by chance."),
        }

    @staticmethod
    def _gauge(name: str, text: str) -> Gauge:
        return Gauge(f"vllm_ext:{name}", text, _LABELS, multiprocess_mode="mostrecent")


_JUDGEMENTS = frozenset({"coverage", "relative_error", "tau"})
_FEWEST_JUDGED = 20


@functools.cache
def _metrics() -> _Metrics:
    return _Metrics()


class PredictorMetrics:
    """The metrics under one model's name."""

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name}
        self._metrics = _metrics()
        self._starts = 0
        self._metrics.up.labels(**self._labels).set(0)

    def outcome(self, name: str, count: int = 1) -> None:
        """Count requests by what came of their prediction."""
        if count:
            self._metrics.outcomes.labels(**self._labels, outcome=name).inc(count)

    def dropped(self, what: str, count: int = 1) -> None:
        """Count what did not reach the predictor: ``finished`` requests, or a ``message`` that is none."""
        if count:
            self._metrics.dropped.labels(**self._labels, what=what).inc(count)

    def latency(self, seconds: float) -> None:
        """Note how long a prediction took."""
        self._metrics.latency.labels(**self._labels).observe(seconds)

    def status(self, status: Status | None) -> None:
        """Take over what the predictor says of itself; None when it is gone."""
        self._metrics.up.labels(**self._labels).set(0 if status is None else 1)
        if status is None:
            return
        for name, gauge in self._metrics.gauges.items():
            # A quality judged by a handful of requests says nothing, and none is better than a zero.
            if name not in _JUDGEMENTS or status.judged >= _FEWEST_JUDGED:
                gauge.labels(**self._labels).set(getattr(status, name))

    def starts(self, total: int) -> None:
        """Take over how often the process was started."""
        if total > self._starts:
            self._metrics.starts.labels(**self._labels).inc(total - self._starts)
            self._starts = total
