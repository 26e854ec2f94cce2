"""What the cells of a benchmark on the real engine add up to: correctness, metrics, medians over repeats and the table.

A part of engine_compare.py and multi_turn.py: it is run from there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from vllm_ext.report.table import Table
from vllm_ext.simulation.measure.latency import RequestTimeline, summarise

NORMALISED = "normalised_latency_mean_ms_per_token"
Reduced = Mapping[tuple[str, float], Mapping[str, float]]
"""(system, load or rate) -> metrics."""


class WrongOutput(RuntimeError):
    """A system did not serve every request to exactly its length; its latencies mean nothing."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measured run of one system."""

    system: str
    at: float
    """Load or rate."""
    repeat: int
    metrics: Mapping[str, float]


def timelines(label: str, requests: Sequence[Mapping[str, Any]]) -> list[RequestTimeline]:
    """Check what was served.

    Raises:
        WrongOutput: a request has another length than it should, or did not end by itself.
    """
    for one in requests:
        tokens, reason = len(one["token_times_s"]), one["finish_reason"]
        if tokens != one["output_tokens"] or reason != "stop":
            raise WrongOutput(
                f"{label}: request {one['req_id']} ended with {tokens} tokens, reason {reason!r}; expected "
                f"{one['output_tokens']} tokens, reason 'stop'. Is the forced-length hook installed in the engine core?"
            )
    fields = ("req_id", "arrival_s", "token_times_s")
    return [RequestTimeline(**{field: one[field] for field in fields}) for one in requests]


def phase_metrics(label: str, phase: Mapping[str, Any], expected: int) -> dict[str, float]:
    """Check a phase and reduce it to flat metrics.

    Raises:
        WrongOutput: see `timelines`; or not as many requests were served as expected.
    """
    requests, foreign = phase["requests"], phase["foreign_cpu_cores"]
    if len(requests) != expected:
        raise WrongOutput(f"{label}: {len(requests)} requests were served, expected {expected}")
    return {
        **summarise(timelines(label, requests)),
        **phase["load"],
        **({} if foreign is None else {"foreign_cpu_cores": foreign}),
        "client_lateness_max_ms": max(one["sent_s"] - one["arrival_s"] for one in requests) * 1000,
    }


def reduce(cells: Sequence[Cell]) -> dict[tuple[str, float], dict[str, float]]:
    """Return medians over repeats of what all repeats have."""
    groups: dict[tuple[str, float], list[Mapping[str, float]]] = {}
    for cell in cells:
        groups.setdefault((cell.system, cell.at), []).append(cell.metrics)
    return {
        key: {name: median(one[name] for one in group) for name in sorted(set.intersection(*map(set, group)))}
        for key, group in groups.items()
    }


def pairs(cells: Sequence[Cell], system: str, other: str, at: float, metric: str) -> list[tuple[float, float]]:
    """Return the values of two systems, repeat by repeat; repeats that lack one are left out."""
    found: dict[str, dict[int, float]] = {system: {}, other: {}}
    for cell in cells:
        if cell.at == at and cell.system in found and metric in cell.metrics:
            found[cell.system][cell.repeat] = cell.metrics[metric]
    return [(value, found[other][repeat]) for repeat, value in sorted(found[system].items()) if repeat in found[other]]


def flatten(
    reduced: Reduced, baselines: Collection[str], named: str
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Split into metrics (``alise.load_0.9.ttft_mean_ms``) and baselines (system -> ``load_0.9.ttft_mean_ms``).

    Args:
        reduced: What `reduce` returned.
        baselines: Systems that are.
        named: Format of the load or rate, e.g. ``load_{:g}``.
    """
    metrics: dict[str, float] = {}
    by_system: dict[str, dict[str, float]] = {}
    for (system, at), values in reduced.items():
        for key, value in values.items():
            name = f"{named.format(at)}.{key}"
            if system in baselines:
                by_system.setdefault(system, {})[name] = value
            else:
                metrics[f"{system}.{name}"] = value
    return metrics, by_system


def table(reduced: Reduced, columns: Mapping[str, str], header: Sequence[str]) -> Table:
    """One line per load or rate and system, in the order measured; ``columns`` maps metrics to headers."""
    ordered = sorted(reduced.items(), key=lambda item: item[0][1])
    rows = [[f"{at:.3g}", system, *(values.get(key) for key in columns)] for (system, at), values in ordered]
    return Table([*header, *columns.values()], rows)
