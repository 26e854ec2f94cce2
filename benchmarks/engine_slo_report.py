"""Objectives in `engine_compare.py`: what was met, what that is compared with others, the goals and the table.

A part of engine_compare.py: it is run from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import engine_report as report
import numpy as np
from engine_rows import BASELINE, MEMORY_BOUND, MIXED_SLO, UPSTREAM
from engine_slo import tier_of

from vllm_ext.observability.results import Goal
from vllm_ext.simulation.latency import RequestTimeline

ATTAINED = "slo_attainment_fraction"
GAPS = "tbt_p99_over_slo"
GAIN = "slo_attainment_gain_points"
THROUGHPUT = "throughput_tokens_per_s"
STEPS, EVICTIONS = "output_steps", "preemptions"

Pair = tuple[float, float]
Reduced = Mapping[tuple[str, float], Mapping[str, float]]

OWN_METRICS: Mapping[str, tuple[tuple[str, str, bool], ...]] = {
    MIXED_SLO: (
        ("sarathi", GAPS, False),
        ("accelgen", ATTAINED, True),
        ("accelgen", "goodput_requests_per_s", True),
        ("alise", report.NORMALISED, False),
        ("fastgen", THROUGHPUT, True),
    ),
    MEMORY_BOUND: (("past-future", EVICTIONS, False), ("past-future", STEPS, False)),
}
"""By workload: a system, the metric it was made for, and whether more of it is better."""

COLUMNS = {
    ATTAINED: "all met",
    "slo_ttft_attainment_fraction": "ttft met",
    "slo_tbt_attainment_fraction": "tbt met",
    "goodput_requests_per_s": "good req/s",
    "goodput_tokens_per_s": "good tok/s",
    GAPS: "tbt p99/slo",
    "tbt_p99_ms": "tbt p99",
    "tbt_max_ms": "tbt max",
    "ttft_p50_ms": "ttft p50",
    "ttft_p99_ms": "ttft p99",
    report.NORMALISED: "norm ms/tok",
    THROUGHPUT: "tok/s",
    report.RATIOS[THROUGHPUT]: "x upstream",
    EVICTIONS: "preempt",
    STEPS: "steps",
    "policy_us_per_step": "policy us",
    "foreign_cpu_cores": "others",
}
"""Metrics of the table, and their headers."""


def metrics(sent: Sequence[Mapping[str, Any]], lines: Sequence[RequestTimeline]) -> dict[str, float]:
    """Judge requests by their objectives.

    A request met its TBT objective if no gap between its tokens was longer. `GAPS` is the P99, over all gaps of all
    requests, of a gap in relation to the objective of its request: at most 1 means that P99 TBT was within it. Goodput
    counts requests that met everything, and their tokens, from the first arrival to the last token.

    Args:
        sent: Requests with ``hints`` (milliseconds) and ``source_id``.
        lines: What became of each.
    """
    ttft_ms = np.array([line.ttft_s * 1000 for line in lines])
    gaps_ms = [np.diff(np.asarray(line.token_times_s, dtype=np.float64)) * 1000 for line in lines]
    ttft_slo = np.array([request["hints"]["ttft_slo_ms"] for request in sent])
    tbt_slo = np.array([request["hints"]["tbt_slo_ms"] for request in sent])
    in_ttft = ttft_ms <= ttft_slo
    in_tbt = np.array([gaps.max(initial=0.0) for gaps in gaps_ms]) <= tbt_slo
    met = in_ttft & in_tbt
    tokens = np.array([len(line.token_times_s) for line in lines])
    span_s = max(line.token_times_s[-1] for line in lines) - min(line.arrival_s for line in lines)
    relative = np.concatenate([gaps / slo for gaps, slo in zip(gaps_ms, tbt_slo, strict=True)])
    found = {
        ATTAINED: float(met.mean()),
        "slo_ttft_attainment_fraction": float(in_ttft.mean()),
        "slo_tbt_attainment_fraction": float(in_tbt.mean()),
        "goodput_requests_per_s": float(met.sum()) / span_s,
        "goodput_tokens_per_s": float(tokens[met].sum()) / span_s,
    }
    if len(relative):
        found[GAPS] = float(np.percentile(relative, 99))
    tiers = np.array([tier_of(request["source_id"]) for request in sent])
    for tier in sorted(set(tiers)):
        found[f"tier_{tier}_{ATTAINED}"] = float(met[tiers == tier].mean())
    return found


def pairs(cells: Sequence[report.Cell], system: str, other: str, load: float, metric: str) -> list[Pair]:
    """Return the values of two systems, repeat by repeat; repeats that lack one are left out."""
    by_repeat = {(c.system, c.repeat): c.metrics for c in cells if c.load == load}
    found = []
    for repeat in sorted({repeat for _, repeat in by_repeat}):
        ours, theirs = by_repeat.get((system, repeat)), by_repeat.get((other, repeat))
        if ours and theirs and metric in ours and metric in theirs:
            found.append((ours[metric], theirs[metric]))
    return found


def add_gains(cells: Sequence[report.Cell], reduced: Mapping[tuple[str, float], dict[str, float]]) -> None:
    """Add to each system's metrics what it gained in attainment over upstream, in points, as a median of repeats."""
    for (system, load), values in reduced.items():
        found = pairs(cells, system, BASELINE, load, ATTAINED)
        if found and system != BASELINE:
            values[GAIN] = median(100 * (ours - base) for ours, base in found)


def goals(cells: Sequence[report.Cell], reduced: Reduced, workload: str, note: str) -> list[Goal]:
    """Return the goals of a workload whose systems were measured; each states the values it rests on."""
    judged: list[Goal] = []
    for load in dict.fromkeys(load for _, load in reduced):
        made = _mixed(cells, reduced, load) if workload == MIXED_SLO else _memory(cells, load)
        judged += [*made, *_auto(cells, workload, load)]
    return [_with_note(goal, note) for goal in judged]


def _with_note(goal: Goal, note: str) -> Goal:
    text = f"{note} {goal.note}".strip()
    return Goal(metric=goal.metric, value=goal.value, op=goal.op, goal=goal.goal, note=text)


def _mixed(cells: Sequence[report.Cell], reduced: Reduced, load: float) -> Iterator[Goal]:
    base = reduced.get((BASELINE, load))
    if base is None:
        return
    if GAPS in (sarathi := reduced.get(("sarathi", load), {})):
        upstream = f"{BASELINE}: P99 of gap over objective {base[GAPS]:.2f}, {base['tbt_p99_ms']:.1f} ms"
        ours = f"sarathi: {sarathi[GAPS]:.2f}, {sarathi['tbt_p99_ms']:.1f} ms"
        yield Goal(metric=f"{BASELINE}.load_{load:g}.{GAPS}", value=base[GAPS], op=">", goal=1.0, note=upstream)
        note = f"{ours}; {upstream}"
        yield Goal(metric=f"sarathi.load_{load:g}.{GAPS}", value=sarathi[GAPS], op="<=", goal=1.0, note=note)
        found = pairs(cells, "sarathi", BASELINE, load, THROUGHPUT)
        yield _ratio_goal("sarathi", BASELINE, load, THROUGHPUT, found, op=">=", limit=0.97)
    if GAIN in (accelgen := reduced.get(("accelgen", load), {})):
        note = f"attainment: accelgen {accelgen[ATTAINED]:.3f}, {BASELINE} {base[ATTAINED]:.3f}"
        yield Goal(metric=f"accelgen.load_{load:g}.{GAIN}", value=accelgen[GAIN], op=">=", goal=30.0, note=note)


def _memory(cells: Sequence[report.Cell], load: float) -> Iterator[Goal]:
    for metric, limit in ((EVICTIONS, 0.2), (STEPS, 1.0)):
        if found := pairs(cells, "past-future", "aggressive", load, metric):
            yield _ratio_goal("past-future", "aggressive", load, metric, found, op="<=", limit=limit)


def _ratio_goal(
    system: str, other: str, load: float, metric: str, found: Sequence[Pair], *, op: str, limit: float
) -> Goal:
    """A goal for the median over repeats of one system's value over another's; where both are 0 they are equal."""
    ratios = [ours / theirs if theirs else (1.0 if not ours else ours + 1.0) for ours, theirs in found]
    note = (
        f"{metric}: {system} {median(a for a, _ in found):.5g}, {other} {median(b for _, b in found):.5g}; "
        f"ratio over repeats {min(ratios):.3f} to {max(ratios):.3f}"
    )
    name = f"{system}.load_{load:g}.{metric}_over_{other}"
    return Goal(metric=name, value=median(ratios), op=op, goal=limit, note=note)


def _auto(cells: Sequence[report.Cell], workload: str, load: float) -> Iterator[Goal]:
    """Return how far ``auto`` is behind each system on that one's own metric, and behind the best of upstream's rows.

    The loss is a ratio above 1. Gaps within their objective count alike, and preemptions as one more than there were.
    """
    for system, metric, more_is_better in OWN_METRICS[workload]:
        losses = {
            other: median(_loss(metric, more_is_better, *pair) for pair in found)
            for other in dict.fromkeys((system, *UPSTREAM))
            if (found := pairs(cells, "auto", other, load, metric))
        }
        if system in losses:
            note = f"{metric} against {system}: loss {losses[system]:.3f}"
            name = f"auto.load_{load:g}.{metric}_loss_to_{system}"
            yield Goal(metric=name, value=losses.pop(system), op="<=", goal=1.02, note=note)
        if losses:
            best = max(losses, key=losses.__getitem__)
            note = f"{metric} against {best}, the best of upstream's rows in this: loss {losses[best]:.3f}"
            name = f"auto.load_{load:g}.{metric}_loss_to_upstream"
            yield Goal(metric=name, value=losses[best], op="<=", goal=1.0, note=note)


def _loss(metric: str, more_is_better: bool, ours: float, theirs: float) -> float:
    if metric == GAPS:
        ours, theirs = max(ours, 1.0), max(theirs, 1.0)
    if metric == EVICTIONS:
        ours, theirs = ours + 1, theirs + 1
    worse, better = (theirs, ours) if more_is_better else (ours, theirs)
    if not better:
        return 1.0 if not worse else worse + 1.0
    return worse / better
