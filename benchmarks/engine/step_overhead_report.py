"""What the times of `step_overhead.py` add up to: ratios with their intervals, metrics, goals and the table.

A part of step_overhead.py: it is run from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from step_overhead_subject import BASELINE, Cell, Subject

from vllm_ext.report.claim import Claim

MODEL_STEP_S = 0.025
"""Step of the model against which the policy's own share is taken. Source: an 8B model on one GPU takes about that."""
RATIO_GOAL = 1.20
OWN_RATIO_GOALS = {"fcfs": 1.05, "fcfs:tier-ahead": 1.05, "fcfs:gaps": 1.02}
FLATNESS_GOAL = 1.10
POLICY_SHARE_GOAL, POLICY_SHARE_OF = 0.01, "past-future"
SMALL_BATCH, SMALL_POLICY_GOAL_US = 8, 100.0
"""Running requests at which a step is so short that policies are held to a time of their own."""
STEADY = 0.98
"""Share of its requests that a system must keep running on average for its steps to be like upstream's."""
HEADER = (
    "state",
    "running",
    "waiting",
    "system",
    "schedule us",
    "update us",
    "step us",
    "p99 us",
    "ratio",
    "95 % interval",
    "policy us",
    "% of 25 ms",
    "preempted",
)

Group = Mapping[Cell, Mapping[str, Subject]]
"""Cells of systems measured side by side, upstream among them."""
Found = dict[str, dict[str, float]]


def ratio_interval(ours: np.ndarray, base: np.ndarray, rng: np.random.Generator) -> tuple[float, float, float]:
    """Ratio of medians and its 95 % interval; blocks, not steps, are resampled, because neighbours are alike."""
    picks = rng.integers(0, len(ours), size=(1000, len(ours)))
    ratios = [np.median(ours[pick]) / np.median(base[pick]) for pick in picks]
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(np.median(ours) / np.median(base)), float(low), float(high)


def summarise(groups: Iterable[Group], seed: int) -> tuple[Found, Found, list[list[object]]]:
    """Reduce what was measured.

    Returns:
        Metrics of each system, of the upstream measured beside it under the same keys, and the rows of the table.
    """
    rng = np.random.default_rng(seed)
    found: Found = {}
    beside: Found = {}
    rows: list[list[object]] = []
    for group in groups:
        for cell, subjects in group.items():
            upstream = subjects[BASELINE].times.total()
            base = _facts(cell, subjects[BASELINE])
            for name, subject in subjects.items():
                ratio, low, high = ratio_interval(subject.times.total(), upstream, rng)
                facts = _facts(cell, subject)
                if name != BASELINE:
                    beside.setdefault(name, {}).update(base)
                    facts[f"{cell.key}_ratio"] = round(ratio, 4)
                    facts[f"{cell.key}_ratio_ci_low"] = round(low, 4)
                    facts[f"{cell.key}_ratio_ci_high"] = round(high, 4)
                    found.setdefault(name, {}).update(facts)
                rows.append(_row(cell, name, facts, ratio, f"{low:.3f}..{high:.3f}"))
    return found, beside, rows


def _facts(cell: Cell, subject: Subject) -> dict[str, float]:
    times, key = subject.times, cell.key
    medians = {"step": times.total(), "schedule": np.array(times.schedule), "update": np.array(times.update)}
    facts = {f"{key}_{part}_us": round(float(np.median(values) * 1e6), 1) for part, values in medians.items()}
    facts[f"{key}_step_p99_us"] = round(float(np.percentile(times.total(), 99) * 1e6), 1)
    facts[f"{key}_preemptions"] = float(subject.preempted)
    facts[f"{key}_mean_running_requests"] = round(subject.mean_running, 2)
    if times.policy:
        policy_s = float(np.median(times.policy))
        facts[f"{key}_policy_us"] = round(policy_s * 1e6, 1)
        facts[f"{key}_policy_share_of_25ms_step"] = round(policy_s / MODEL_STEP_S, 6)
    if subject.name != BASELINE:
        facts[f"{key}_policy_fallbacks"] = float(subject.fallbacks)
    return facts


def _row(cell: Cell, name: str, facts: Mapping[str, float], ratio: float, interval: str) -> list[object]:
    def of(part: str) -> float | None:
        return facts.get(f"{cell.key}_{part}")

    times = [of(f"{part}_us") for part in ("schedule", "update", "step", "step_p99")]
    share = of("policy_share_of_25ms_step")
    policy = [of("policy_us"), None if share is None else 100 * share]
    preempted = int(of("preemptions") or 0)
    return [cell.state, cell.running, cell.waiting, name, *times, ratio, interval, *policy, preempted]


def claims(found: Found, beside: Found, cells: Iterable[Cell], running: int) -> list[Claim]:
    """Compare with what was wanted.

    At the larger batch: worst ratio of any state, growth, and the policy's share; at a small one: time in policies.
    """
    cells = tuple(dict.fromkeys(cells))
    large = [cell for cell in cells if cell.running == running]
    judged = []
    for name, ours in found.items():
        own = [cell for cell in large if f"{cell.key}_ratio" in ours]
        judged.append(_worst_ratio(name, ours, beside[name], own, running))
        seats = [cell for cell in own if not cell.memory_bound]
        if name != "fcfs" and len({cell.waiting for cell in seats}) > 1:
            judged.append(_growth(name, ours, beside[name], seats, running))
        shares = [ours[key] for cell in own if (key := f"{cell.key}_policy_share_of_25ms_step") in ours]
        if name == POLICY_SHARE_OF and shares:
            metric = f"{name}_policy_share_of_25ms_step_{running}_running"
            note = f"policy: {max(shares) * MODEL_STEP_S * 1e6:.0f} us per step at worst"
            judged.append(Claim(name=metric, value=max(shares), op="<", goal=POLICY_SHARE_GOAL, facts=note))
        small = [cell for cell in cells if cell.running == SMALL_BATCH and f"{cell.key}_policy_us" in ours]
        if small:
            judged.append(_small_policy(name, ours, small))
    return judged


def _small_policy(name: str, ours: Mapping[str, float], cells: Sequence[Cell]) -> Claim:
    worst = max(cells, key=lambda cell: ours[f"{cell.key}_policy_us"])
    return Claim(
        name=f"{name}_worst_policy_us_{SMALL_BATCH}_running",
        value=ours[f"{worst.key}_policy_us"],
        op="<=",
        goal=SMALL_POLICY_GOAL_US,
        facts=f"worst with {worst.waiting} waiting, bound by {worst.state}, of a step of "
        f"{ours[worst.key + '_step_us']:.0f} us",
    )


def _worst_ratio(
    name: str, ours: Mapping[str, float], base: Mapping[str, float], cells: Sequence[Cell], running: int
) -> Claim:
    worst = max(cells, key=lambda cell: ours[f"{cell.key}_ratio"])
    key = worst.key
    extra = {part: ours[f"{key}_{part}_us"] - base[f"{key}_{part}_us"] for part in ("schedule", "update")}
    note = (
        f"worst with {worst.waiting} waiting, bound by {worst.state}: schedule {extra['schedule']:+.0f} us, "
        f"update {extra['update']:+.0f} us on upstream's {base[key + '_step_us']:.0f} us"
    )
    mean = ours[f"{key}_mean_running_requests"]
    if ours[f"{key}_preemptions"] or mean < STEADY * running:
        note += (
            f"; it is no steady state for this system: {ours[f'{key}_preemptions']:.0f} preemptions, {mean:.0f} running"
        )
    return Claim(
        name=f"{name}_worst_ratio_{running}_running",
        value=ours[f"{key}_ratio"],
        op="<=",
        goal=OWN_RATIO_GOALS.get(name, RATIO_GOAL),
        facts=note,
    )


def _growth(
    name: str, ours: Mapping[str, float], base: Mapping[str, float], cells: Sequence[Cell], running: int
) -> Claim:
    by_length = sorted(cells, key=lambda cell: cell.waiting)
    shortest, longest = by_length[0], by_length[-1]

    def growth(values: Mapping[str, float], start: Cell) -> float:
        return values[f"{longest.key}_step_us"] / values[f"{start.key}_step_us"]

    note = (
        f"{name} {growth(ours, shortest):.3f}, upstream {growth(base, shortest):.3f}: cost with {longest.waiting} "
        f"waiting over cost with {shortest.waiting}"
    )
    if len(by_length) > 2 and shortest.waiting == 0:  # from nobody to somebody, policies begin to work at all
        other = by_length[1]
        note += f"; over cost with {other.waiting}: {growth(ours, other):.3f} and {growth(base, other):.3f}"
    value = round(growth(ours, shortest) / growth(base, shortest), 4)
    metric = f"{name}_growth_over_upstream_growth_{running}_running"
    return Claim(name=metric, value=value, op="<=", goal=FLATNESS_GOAL, facts=note)
