"""What was measured, as tables and as flat metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_ext.observability.results import format_table
from vllm_ext.prediction.evaluation.measures import MEASURES
from vllm_ext.prediction.evaluation.online import Stretch

UNITS = {
    "accuracy_200": "fraction",
    "accuracy_deciles": "fraction",
    "within_one_decile": "fraction",
    "relative_error": "fraction",
    "median_relative_error": "fraction",
    "total_error": "fraction",
    "tau": "",
    "pair_accuracy": "fraction",
    "coverage_p90": "fraction",
    "pinball": "nats",
}
_HEADER = (
    "acc. 200",
    "acc. tenths",
    "+-1 tenth",
    "rel. error",
    "median",
    "total",
    "tau",
    "pairs",
    "P90 cov.",
    "pinball",
)


def key(measure: str) -> str:
    """Return the name of a measure in results: with its unit."""
    unit = UNITS[measure]
    return f"{measure}_{unit}" if unit else measure


def metrics(scores: Mapping[str, float]) -> dict[str, float]:
    """Return one predictor's measures under the names of results."""
    return {key(name): round(scores[name], 4) for name in MEASURES}


def score_table(scores: Mapping[str, Mapping[str, float]], latency_ms: Mapping[str, float] | None = None) -> str:
    """Lay out a row per predictor; latency per prompt where it was measured."""
    header = ["predictor", *_HEADER, *(["ms/prompt"] if latency_ms is not None else [])]
    rows: list[list[object]] = []
    for name, found in scores.items():
        row: list[object] = [name, *(round(found[measure], 3) for measure in MEASURES)]
        if latency_ms is not None:
            row.append(latency_ms.get(name))
        rows.append(row)
    return format_table(header, rows)


def curve_table(stretches: Sequence[Stretch]) -> str:
    """Lay out a row per predictor and stretch of the learning curve."""
    rows = [
        [s.served, s.requests, name, *(round(found[measure], 3) for measure in MEASURES)]
        for s in stretches
        for name, found in s.scores.items()
    ]
    return format_table(["served", "requests", "predictor", *_HEADER], rows)
