"""What `engine_compare.py` compares with what: ratios within a repeat, objectives met, the goals and the table.

A part of engine_compare.py: it is run from there. A new goal is one line of `COMPARISONS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from engine_report import NORMALISED, Cell, Reduced, pairs
from engine_rows import BASELINE, MEMORY_BOUND, MIXED_SLO, PREEMPTED, UPSTREAM
from engine_slo import tier_of

from vllm_ext.report.claim import Claim
from vllm_ext.simulation.measure.latency import RequestTimeline

TTFT, TOKENS = "ttft_p50_ms", "throughput_tokens_per_s"
RATIOS = {
    NORMALISED: "normalised_latency_mean_ratio",
    "normalised_latency_p90_ms_per_token": "normalised_latency_p90_ratio",
    "e2e_mean_ms": "e2e_mean_ratio",
    "ttft_mean_ms": "ttft_mean_ratio",
    TTFT: "ttft_p50_ratio",
    TOKENS: "throughput_tokens_ratio",
}
"""Metric -> name of its ratio to upstream-fcfs in the same repeat; the median over repeats is reported."""
ATTAINED, GAPS, GAIN = "slo_attainment_fraction", "tbt_p99_over_slo", "slo_attainment_gain_points"
STEPS, EVICTIONS = "output_steps", "preemptions"
COLUMNS = {
    NORMALISED: "norm ms/tok",
    "normalised_latency_p90_ms_per_token": "p90",
    "normalised_latency_p99_ms_per_token": "p99",
    RATIOS[NORMALISED]: "x upstream",
    "ttft_mean_ms": "ttft ms",
    TTFT: "p50",
    "ttft_p99_ms": "p99",
    "tbt_p99_ms": "tbt p99",
    TOKENS: "tok/s",
    "throughput_requests_per_s": "req/s",
    "mean_waiting_requests": "waiting",
    EVICTIONS: "preempt",
    "foreign_cpu_cores": "others",
}
SLO_COLUMNS = {
    ATTAINED: "all met",
    "slo_ttft_attainment_fraction": "ttft met",
    "slo_tbt_attainment_fraction": "tbt met",
    "goodput_requests_per_s": "good req/s",
    "goodput_tokens_per_s": "good tok/s",
    GAPS: "tbt p99/slo",
    "tbt_p99_ms": "tbt p99",
    "tbt_max_ms": "tbt max",
    TTFT: "ttft p50",
    "ttft_p99_ms": "ttft p99",
    NORMALISED: "norm ms/tok",
    TOKENS: "tok/s",
    RATIOS[TOKENS]: "x upstream",
    EVICTIONS: "preempt",
    STEPS: "steps",
    "policy_us_per_step": "policy us",
    "foreign_cpu_cores": "others",
}
"""Metrics of the table, and their headers, without objectives and with them."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A goal: the median over repeats of a row's metric over another's in the same repeat."""

    row: str
    other: str = BASELINE
    metric: str
    op: str
    goal: float
    load: float | None = None
    """Where it is judged; None: at every load."""

    @property
    def name(self) -> str:
        """Part of the goal's name."""
        if self.load is not None:
            return RATIOS[self.metric]
        return f"{self.metric}_over_{self.other.replace(':', '_').replace('-', '_') if ':' in self.row else self.other}"


def _at_most(row: str, other: str, goal: float = 1.0, metric: str = NORMALISED) -> Comparison:
    return Comparison(row=row, other=other, metric=metric, op="<=", goal=goal)


_FATES = (
    ("swap-8", "defer"),
    ("swap-8", "recompute"),
    ("cost-8", "defer"),
    ("swap-8-ahead", "defer"),
    ("swap-8-ahead", "recompute"),
    ("cost-8-ahead", "defer"),
    *((row, other) for row in ("in-place-10", "in-place-20") for other in ("defer", "recompute", "swap-8-ahead")),
)
"""Variants for what becomes of preempted jobs' KV, and those that each is to be as good as."""
COMPARISONS = (
    Comparison(row="oracle-alise", load=0.9, metric=NORMALISED, op="<=", goal=0.6),
    Comparison(row="oracle-alise", load=0.5, metric=NORMALISED, op="<=", goal=1.02),
    Comparison(row="alise", load=0.5, metric=NORMALISED, op="<=", goal=1.02),
    Comparison(row="alise@cold", load=0.1, metric=TTFT, op="<=", goal=1.02),
    Comparison(row="alise@warm", load=0.1, metric=TTFT, op="<=", goal=1.02),
    *(_at_most(f"{PREEMPTED}:{row}", f"{PREEMPTED}:{other}") for row, other in _FATES),
    Comparison(row="fcfs:tier-early", other="fcfs", metric=TOKENS, op=">=", goal=0.99),
    Comparison(row="fcfs:tier-ahead", other="fcfs", metric=TOKENS, op=">=", goal=0.99),
)
SLO_COMPARISONS = {
    MIXED_SLO: (Comparison(row="sarathi", metric=TOKENS, op=">=", goal=0.97),),
    MEMORY_BOUND: (
        _at_most("past-future", "aggressive", 0.2, EVICTIONS),
        _at_most("past-future", "aggressive", 1.0, STEPS),
    ),
}
OWN_METRICS: Mapping[str, tuple[tuple[str, str, bool], ...]] = {
    MIXED_SLO: (
        ("sarathi", GAPS, False),
        ("accelgen", ATTAINED, True),
        ("accelgen", "goodput_requests_per_s", True),
        ("alise", NORMALISED, False),
        ("fastgen", TOKENS, True),
    ),
    MEMORY_BOUND: (("past-future", EVICTIONS, False), ("past-future", STEPS, False)),
}
"""By workload: a system, the metric it was made for, and whether more of it is better."""


def slo_metrics(sent: Sequence[Mapping[str, Any]], lines: Sequence[RequestTimeline]) -> dict[str, float]:
    """Judge requests by their objectives.

    A request met its TBT objective if no gap between its tokens was longer. `GAPS` is the P99, over all gaps of all
    requests, of a gap in relation to the objective of its request: at most 1 means that P99 TBT was within it. Goodput
    counts requests that met everything, and their tokens, from the first arrival to the last token.

    Args:
        sent: Requests with ``hints`` (milliseconds) and ``source_id``.
        lines: What became of each.
    """
    ttft_slo, tbt_slo = (np.array([one["hints"][f"{kind}_slo_ms"] for one in sent]) for kind in ("ttft", "tbt"))
    gaps_ms = [np.diff(np.asarray(line.token_times_s, dtype=np.float64)) * 1000 for line in lines]
    in_ttft = np.array([line.ttft_s * 1000 for line in lines]) <= ttft_slo
    in_tbt = np.array([gaps.max(initial=0.0) for gaps in gaps_ms]) <= tbt_slo
    met = in_ttft & in_tbt
    tokens = np.array([len(line.token_times_s) for line in lines])
    span_s = max(line.token_times_s[-1] for line in lines) - min(line.arrival_s for line in lines)
    relative = np.concatenate([gaps / slo for gaps, slo in zip(gaps_ms, tbt_slo, strict=True)])
    tiers = np.array([tier_of(request["source_id"]) for request in sent])
    return {
        ATTAINED: float(met.mean()),
        "slo_ttft_attainment_fraction": float(in_ttft.mean()),
        "slo_tbt_attainment_fraction": float(in_tbt.mean()),
        "goodput_requests_per_s": float(met.sum()) / span_s,
        "goodput_tokens_per_s": float(tokens[met].sum()) / span_s,
        **({GAPS: float(np.percentile(relative, 99))} if len(relative) else {}),
        **{f"tier_{tier}_{ATTAINED}": float(met[tiers == tier].mean()) for tier in sorted(set(tiers))},
    }


def add_ratios(cells: Sequence[Cell], reduced: Mapping[tuple[str, float], dict[str, float]]) -> None:
    """Add to each system's metrics its ratios to upstream, and its gain in attainment in points: medians of repeats."""
    for (system, at), values in reduced.items():
        if system == BASELINE:
            continue
        for metric, name in RATIOS.items():
            if ratios := [ours / base for ours, base in pairs(cells, system, BASELINE, at, metric)]:
                values |= {name: median(ratios), f"{name}_min": min(ratios), f"{name}_max": max(ratios)}
        if found := pairs(cells, system, BASELINE, at, ATTAINED):
            values[GAIN] = median(100 * (ours - base) for ours, base in found)


def claims(cells: Sequence[Cell], reduced: Reduced, workload: str, note: str) -> list[Claim]:
    """Return the goals of a workload whose systems were measured; each states the values it rests on."""
    judged: list[Claim] = []
    for load in dict.fromkeys(load for _, load in reduced):
        if workload == MIXED_SLO and (BASELINE, load) in reduced:
            judged += _objectives(reduced, load)
        for one in SLO_COMPARISONS.get(workload, COMPARISONS):
            if one.load in (None, load) and (found := pairs(cells, one.row, one.other, load, one.metric)):
                judged.append(_compared(one, load, found, reduced))
        judged += _auto(cells, workload, load)
    return [replace(goal, facts=f"{note} {goal.facts}".strip()) for goal in judged]


def _compared(one: Comparison, load: float, found: Sequence[tuple[float, float]], reduced: Reduced) -> Claim:
    """Where both values are 0 they are equal."""
    ratios = [ours / theirs if theirs else (1.0 if not ours else ours + 1.0) for ours, theirs in found]
    ours, theirs = (median(values) for values in zip(*found, strict=True))
    waiting = (f"{reduced[row, load]['mean_waiting_requests']:.1f} ({row})" for row in (one.row, one.other))
    note = (
        f"{one.metric}: {one.row} {ours:.5g}, {one.other} {theirs:.5g}; ratio over repeats {min(ratios):.3f} to "
        f"{max(ratios):.3f}; waiting on average: {', '.join(waiting)}; {reduced[one.row, load][EVICTIONS]:.0f} "
        "preemptions"
    )
    name = f"{one.row}.load_{load:g}.{one.name}"
    return Claim(name=name, value=median(ratios), op=one.op, goal=one.goal, facts=note)


def _objectives(reduced: Reduced, load: float) -> Iterator[Claim]:
    base = reduced[BASELINE, load]
    if GAPS in (sarathi := reduced.get(("sarathi", load), {})):
        upstream = f"{BASELINE}: P99 of gap over objective {base[GAPS]:.2f}, {base['tbt_p99_ms']:.1f} ms"
        note = f"sarathi: {sarathi[GAPS]:.2f}, {sarathi['tbt_p99_ms']:.1f} ms; {upstream}"
        yield Claim(name=f"{BASELINE}.load_{load:g}.{GAPS}", value=base[GAPS], op=">", goal=1.0, facts=upstream)
        yield Claim(name=f"sarathi.load_{load:g}.{GAPS}", value=sarathi[GAPS], op="<=", goal=1.0, facts=note)
    if GAIN in (accelgen := reduced.get(("accelgen", load), {})):
        note = f"attainment: accelgen {accelgen[ATTAINED]:.3f}, {BASELINE} {base[ATTAINED]:.3f}"
        yield Claim(name=f"accelgen.load_{load:g}.{GAIN}", value=accelgen[GAIN], op=">=", goal=30.0, facts=note)


def _auto(cells: Sequence[Cell], workload: str, load: float) -> Iterator[Claim]:
    """Return how far ``auto`` is behind each system on that one's own metric, and behind the best of upstream's rows.

    The loss is a ratio above 1. Gaps within their objective count alike, and preemptions as one more than there were.
    """
    for system, metric, more_is_better in OWN_METRICS.get(workload, ()):
        losses = {
            other: median(_loss(metric, more_is_better, *pair) for pair in found)
            for other in dict.fromkeys((system, *UPSTREAM))
            if (found := pairs(cells, "auto", other, load, metric))
        }
        name = f"auto.load_{load:g}.{metric}_loss_to_"
        if system in losses:
            note = f"{metric} against {system}: loss {losses[system]:.3f}"
            yield Claim(name=name + system, value=losses.pop(system), op="<=", goal=1.02, facts=note)
        if losses:
            best = max(losses, key=losses.__getitem__)
            note = f"{metric} against {best}, the best of upstream's rows in this: loss {losses[best]:.3f}"
            yield Claim(name=f"{name}upstream", value=losses[best], op="<=", goal=1.0, facts=note)


def _loss(metric: str, more_is_better: bool, ours: float, theirs: float) -> float:
    if metric == GAPS:
        ours, theirs = max(ours, 1.0), max(theirs, 1.0)
    if metric == EVICTIONS:
        ours, theirs = ours + 1, theirs + 1
    worse, better = (theirs, ours) if more_is_better else (ours, theirs)
    if not better:
        return 1.0 if not worse else worse + 1.0
    return worse / better
