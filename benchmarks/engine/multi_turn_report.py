"""What the cells of `multi_turn.py` add up to: histories, rates at equal latency, goals and tables.

A part of multi_turn.py: it is run from there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import multi_turn_rows as rows
import numpy as np
from engine_report import Cell, Reduced, phase_metrics, table

from vllm_ext.report.claim import Claim
from vllm_ext.report.table import Table
from vllm_ext.simulation.measure import latency

P90 = "normalised_latency_p90_ms_per_token"
COLUMNS = {
    "normalised_latency_mean_ms_per_token": "norm ms/tok",
    P90: "p90",
    f"{P90}_min": "p90 min",
    f"{P90}_max": "p90 max",
    "ttft_first_mean_ms": "ttft 1st ms",
    "ttft_later_mean_ms": "later",
    "ttft_later_p90_ms": "later p90",
    "throughput_requests_per_s": "turns/s",
    "device_hit_share": "device hits",
    "host_hit_share": "host hits",
    "recomputed_share": "computed again",
    "host_stored_mb": "MB out",
    "host_loaded_mb": "MB in",
    "preemptions": "preempt",
    "foreign_cpu_cores": "others",
}
GOALS = (
    (rows.RETENTION, rows.STATELESS, 1.25),
    (rows.RETENTION, rows.LRU, 1.1),
    (rows.RETENTION_8, rows.LRU, 1.1),
    (rows.RECORDS, rows.PREFIX_CACHE, 1.3),
)
"""Row, baseline, and how many times its conversations it should sustain at equal P90 normalised latency."""
BASELINES = (rows.STATELESS, rows.LRU, rows.PREFIX_CACHE)
ON_DEVICE, ON_DEVICE_GOAL = "history_found_on_device_records_over_prefix_cache_ratio", 1.5
DENSITY, FOUND = "tokens_held_in_equal_bytes_8_over_16_bits_ratio", "history_found_share_8_less_16_bits"
DENSITY_GOAL = 1.9
"""How many times the tokens of 16 bits 8 bits should hold in equal bytes."""


@dataclass(frozen=True)
class Known:
    """A number that a measurement gives, or limits: it lies between two."""

    low: float
    """0: nobody knows how low; the target was passed at the lowest rate measured already."""
    high: float
    """Infinite: nobody knows how high; the target was not reached at the highest rate measured."""

    @property
    def value(self) -> float:
        """The number, or its bound."""
        return self.low or self.high

    def __truediv__(self, other: Known) -> Known:
        """Return a ratio as far as it is known."""
        return Known(self.low / other.high, self.high / other.low if other.low else math.inf)

    def __str__(self) -> str:
        """Write it for a table."""
        bound = ">= " if math.isinf(self.high) else "" if self.low else "<= "
        return f"{bound}{self.value:.3g}"


OPEN = Known(0.0, math.inf)


def climb(rates: Sequence[float], target: float) -> Generator[float, float, None]:
    """Yield the rates to measure to find where latency passes a target, from the middle up, or else down.

    Latency, which is wanted for each, is taken to grow with the rate, so that no other rate would say more.
    """
    ordered, moved = sorted(rates), 0
    at = len(ordered) // 2
    while 0 <= at < len(ordered):
        direction = -1 if (yield ordered[at]) > target else 1
        if moved not in (0, direction):
            return
        at, moved = at + direction, direction


def crossing(points: Sequence[tuple[float, float]], target: float) -> Known:
    """Return the rate at which latency first grows beyond a target, interpolated linearly between two rates.

    Args:
        points: (rate, latency) in any order, at least one.
        target: In the unit of the latencies.

    Raises:
        ValueError: there is no point, or two of one rate.
    """
    ordered = sorted(points)
    if not ordered or len({rate for rate, _ in ordered}) < len(ordered):
        raise ValueError(f"points={points!r}: must be at least one, each of another rate")
    if ordered[0][1] > target:
        return Known(0.0, ordered[0][0])
    for (rate, below), (next_rate, above) in itertools.pairwise(ordered):
        if above > target:
            found = rate + (target - below) / (above - below) * (next_rate - rate)
            return Known(found, found)
    return Known(ordered[-1][0], math.inf)


def middle(found: Sequence[Known]) -> Known:
    """Return the median of at least one number (of an even number, the lower of the two), with its own bound."""
    return sorted(found, key=lambda known: known.value)[(len(found) - 1) // 2]


def cell_metrics(label: str, phase: Mapping[str, Any], turns: int) -> dict[str, float]:
    """Check a phase and reduce it to flat metrics.

    Raises:
        WrongOutput: a turn has another length than it should; or not all turns were served.
    """
    metrics, requests, copies = phase_metrics(label, phase, turns), phase["requests"], dict(phase["copies"])
    for name, later in (("ttft_first", False), ("ttft_later", True)):
        ttfts = [
            (one["token_times_s"][0] - one["arrival_s"]) * 1e3
            for one in requests
            if (one["history_tokens"] > 0) is later
        ]
        if ttfts:
            metrics |= latency.spread(name, np.array(ttfts), "ms", ("mean", "p90"))
    moved = {f"host_{name}_mb": copies.pop(f"host_{name}_bytes") / 1e6 for name in ("stored", "loaded")}
    return {**metrics, **moved, **copies, **_history(requests, copies)}


def _history(requests: Sequence[Mapping[str, Any]], load: Mapping[str, float]) -> dict[str, float]:
    """Where the history of later turns came from; shares are of its tokens."""
    history = sum(one["history_tokens"] for one in requests)
    again = sum(max(0, one["history_tokens"] - one["cached_tokens"]) for one in requests)
    found = {
        "history_tokens": float(history),
        "recomputed_history_tokens": float(again),
        "recomputed_preempted_tokens": load["preempted_tokens"]
        - load["preempted_device_hit_tokens"]
        - load["preempted_host_hit_tokens"],
    }
    if history:
        found["device_hit_share"] = load["device_hit_tokens"] / history
        found["host_hit_share"] = load["host_hit_tokens"] / history
        found["recomputed_share"] = again / history
    return found


def add_spread(cells: Sequence[Cell], reduced: Mapping[tuple[str, float], dict[str, float]]) -> None:
    """Add the smallest and the largest P90 normalised latency of the repeats."""
    for key, values in reduced.items():
        p90s = [cell.metrics[P90] for cell in cells if (cell.system, cell.at) == key]
        values |= {f"{P90}_min": min(p90s), f"{P90}_max": max(p90s)}


def sustained(cells: Sequence[Cell], target_ms: float) -> dict[str, dict[int, Known]]:
    """Return per row and repeat how many conversations/s begin when P90 normalised latency is at the target."""
    curves: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for cell in cells:
        curves.setdefault(cell.system, {}).setdefault(cell.repeat, []).append((cell.at, cell.metrics[P90]))
    return {
        row: {repeat: crossing(points, target_ms) for repeat, points in repeats.items()}
        for row, repeats in curves.items()
    }


def gains(rates: Mapping[str, Mapping[int, Known]], baseline: str) -> dict[str, list[Known]]:
    """Return per row its rates over the baseline's of the same repeat, without those that bounds leave open."""
    base = rates.get(baseline, {})
    found = {
        row: [known for repeat, own in repeats.items() if repeat in base and (known := own / base[repeat]) != OPEN]
        for row, repeats in rates.items()
        if row != baseline
    }
    return {row: ratios for row, ratios in found.items() if ratios}


def summary(rates: Mapping[str, Mapping[int, Known]]) -> dict[str, dict[str, float]]:
    """Return per row its sustained rate and gains as flat metrics; a bound is a metric of its own."""
    found: dict[str, dict[str, float]] = {}
    for row, repeats in rates.items():
        found[row] = _flat("sustained_conversations_per_s", list(repeats.values()))
    for baseline in BASELINES:
        for row, ratios in gains(rates, baseline).items():
            found[row] |= _flat(f"sustained_over_{baseline.replace('-', '_')}_ratio", ratios)
    return found


def _flat(name: str, repeats: Sequence[Known]) -> dict[str, float]:
    known = middle(repeats)
    values = [one.value for one in repeats]
    found = {name: known.value, f"{name}_min": min(values), f"{name}_max": max(values)}
    if known.low != known.high:
        found[f"{name}_is_{'lower' if known.low else 'upper'}_bound"] = 1.0
    return found


def claims(
    reduced: Reduced,
    rates: Mapping[str, Mapping[int, Known]],
    tier_tokens: Mapping[str, int],
    note: str,
) -> list[Claim]:
    """The goals whose rows were measured; a missed one says what was seen.

    Args:
        reduced: What `reduce` returned.
        rates: What `sustained` returned.
        tier_tokens: Row -> how many tokens its tier holds.
        note: Put before what was seen.
    """
    judged: list[Claim] = []

    def judge(metric: str, value: float, op: str, goal: float, facts: str) -> None:
        judged.append(Claim(name=metric, value=value, op=op, goal=goal, facts=f"{note} {facts}".strip()))

    for row, baseline, goal in GOALS:
        ratios = gains(rates, baseline).get(row, [])
        if not ratios or (not middle(ratios).low and middle(ratios).high >= goal):
            continue  # left open by the rates measured; the table says how far
        spread = ", ".join(str(known) for known in ratios)
        facts = f"sustained {middle(list(rates[row].values()))} and {middle(list(rates[baseline].values()))} "
        facts += f"conversations/s; over repeats {spread}"
        metric = f"{row}.sustained_over_{baseline.replace('-', '_')}_ratio"
        judge(metric, middle(ratios).value, ">=", goal, facts)
    sparse, dense = tier_tokens.get(rows.RETENTION), tier_tokens.get(rows.RETENTION_8)
    if sparse and dense:
        judge(DENSITY, dense / sparse, ">=", DENSITY_GOAL, f"{sparse} and {dense} tokens in equal bytes")
    share = {key: values["recomputed_share"] for key, values in reduced.items() if "recomputed_share" in values}
    shares = [
        {rate: value for (name, rate), value in share.items() if name == row}
        for row in (rows.RETENTION, rows.RETENTION_8)
    ]
    if common := shares[0].keys() & shares[1].keys():
        again, less = (mean(own[rate] for rate in common) for own in shares)
        facts = f"computed again, mean over rates: {again:.3f} and {less:.3f} of all histories"
        judge(FOUND, again - less, ">", 0.0, facts)
    found = [
        {rate: values["device_hit_share"] for (name, rate), values in reduced.items()
         if name == row and values.get("device_hit_share")}
        for row in (rows.RECORDS, rows.PREFIX_CACHE)
    ]  # fmt: skip
    if common := found[0].keys() & found[1].keys():
        records, blocks = (mean(own[rate] for rate in common) for own in found)
        facts = f"found on the device, mean over rates: {records:.3f} and {blocks:.3f} of all histories"
        judge(ON_DEVICE, records / blocks, ">=", ON_DEVICE_GOAL, facts)
    return judged


def tables(reduced: Reduced, rates: Mapping[str, Mapping[int, Known]], target_ms: float) -> list[object]:
    """One line per rate and row, in the order of rates; then one line per row with the rate it sustains."""
    over = {baseline: gains(rates, baseline) for baseline in BASELINES}
    ends = [
        [row, _seen(list(repeats.values())), *(_seen(over[baseline].get(row, [])) for baseline in over)]
        for row, repeats in rates.items()
    ]
    header = ["row", f"conv/s at p90 {target_ms:.3g} ms/tok", *(f"x {baseline}" for baseline in over)]
    return [table(reduced, COLUMNS, ("conv/s", "row")), "", Table(header, ends)]


def _seen(repeats: Sequence[Known]) -> str:
    """The median, and all of them where there are several."""
    if not repeats:
        return "-"
    rest = f" ({', '.join(map(str, repeats))})" if len(repeats) > 1 else ""
    return f"{middle(repeats)}{rest}"
