"""Pensieve, Figure 3.14: which KV is dropped."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from vllm_ext.experiments.experiment import Findings, flat, line_plot
from vllm_ext.experiments.grid import Metrics
from vllm_ext.experiments.papers import pensieve as base
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.claim import PaperClaim, Reason, Verdict
from vllm_ext.report.table import Table

RATES, QUICK_RATES = (2.0, 2.5, 3.0, 3.25, 3.5, 3.75), (3.0, 4.5)
"""Up to where both hit less than 80 %, as in the paper."""
QUICK_HOST_SHARE = 0.1
"""Of the host's memory: in a short run little of it would be used."""
HIT_POINTS, FEWER = 4.4, 0.146
"""The paper's largest: percentage points of the host's hit rate, and share of recomputed tokens, against LRU."""
UNDER_PRESSURE = 0.95
"""LRU's hit rate below which there is something to gain."""
OFTEN_MISSED, MISSED_FROM_PER_S = 0.8, 3.2
"""Hit rate, and the rate from which both of the paper's policies are below it."""
HIT, COMPUTED = "host_hit_fraction", "history_computed_tokens"
JUDGED, LRU = base.PENSIEVE, base.tiered("LRU", policy="lru")
SHOWN = (
    JUDGED,
    LRU,
    base.tiered("ARC", policy="arc"),
    base.tiered("tail, least recently used", policy="tail"),
    base.tiered("tail, retention value", policy="retention"),
    base.BY_TURNS,
    base.OURS,
)
REASONS: Mapping[Verdict, Reason] = {
    "below": Reason(
        "weighing by cost finds less, dropping leading ends little more",
        "rows `tail, retention value`, `tail, least recently used` and `Pensieve`",
    )
}


@base.PAPER.figure(
    "pensieve-fig14",
    "Figure 3.14",
    "Retention value against LRU and ARC: host hit rate and recomputed tokens",
    (
        *base.DIFFERENCES,
        "The host's hit rate is what it gave over what the device did not have: tokens loaded over tokens loaded or "
        "computed again of histories.",
        "Rates whose P90 passes the limit of the other figures, 100 ms/token, stand in the table and are not compared.",
    ),
    repeats=2,
)
def fig14(runner: Runner) -> Findings:
    """What is the retention value worth against the least recently used, with leading ends dropped or tails?

    Method: OPT-13B; the same server over several rates, only the eviction policy of its host memory differs; all store
    ahead of time, load within steps, and compute across gaps; our row is beside them. The share of what left the device
    that the host still has, and the tokens of histories that are computed again, are compared at each rate.
    """
    rates, duration_s = (QUICK_RATES, base.QUICK_S) if runner.quick else (RATES, base.DURATION_S)
    share = QUICK_HOST_SHARE if runner.quick else 1.0
    shown = (JUDGED, LRU, base.OURS) if runner.judged_only else SHOWN
    specs = {
        (rate, c.name): base.spec(c, base.OPT_13B, rate, duration_s=duration_s, seed=runner.seed, host_share=share)
        for rate in rates
        for c in shown
    }
    found = {key: figures(metrics) for key, metrics in runner.metrics(specs).items()}
    return Findings(
        tables=[
            Table(
                ("requests/s", "policy", "host hit rate", "history found", "recomputed tokens", "P90 ms/token"),
                [(*key, *one.values()) for key, one in found.items()],
            )
        ],
        claims=claims(*({rate: found[rate, c.name] for rate in rates} for c in (JUDGED, LRU, base.OURS))),
        **flat(found, "rate_{:g}.".format, own={JUDGED.name: ""}),
        config={**base.config(shown, duration_s), "rates_per_s": list(rates), "host_share": share},
        plots=[
            line_plot(
                "",
                {c.name: [(rate, found[rate, c.name][HIT]) for rate in rates] for c in shown},
                xlabel="turns (1/s)",
                ylabel="host hit rate",
                title="OPT-13B, simulated A100-80GB, 220 GB in the host",
            )
        ],
        workload=[base.spec(base.VLLM_2023, base.OPT_13B, 1.0, duration_s=1.0, seed=0).workload],
    )


def figures(metrics: Metrics) -> dict[str, float]:
    """Return what is compared of a run."""
    computed, loaded = metrics[COMPUTED], metrics["tier_hit_tokens"]
    hit = loaded / max(loaded + computed, 1.0)
    return {HIT: hit, base.FOUND: metrics[base.FOUND], COMPUTED: computed, base.P90: metrics[base.P90]}


def claims(
    judged: Mapping[float, Metrics], lru: Mapping[float, Metrics], ours: Mapping[float, Metrics]
) -> list[PaperClaim]:
    """Compare the figures of policies with LRU's, by rate, as far as LRU keeps the latency limit."""
    limit_ms = base.MODELS[base.OPT_13B.model].limit_ms
    inside = [rate for rate in lru if lru[rate][base.P90] <= limit_ms] or [min(lru)]
    pressed = [rate for rate in inside if lru[rate][HIT] < UNDER_PRESSURE] or [max(inside)]
    points, our_points = ({rate: 100 * (one[rate][HIT] - lru[rate][HIT]) for rate in inside} for one in (judged, ours))
    fewer, our_fewer = (
        {rate: 1 - one[rate][COMPUTED] / max(lru[rate][COMPUTED], 1.0) for rate in pressed} for one in (judged, ours)
    )
    found = [
        PaperClaim(
            name="host hit rate, percentage points above LRU",
            goal=HIT_POINTS,
            kind="up to",
            value=max(points.values()),
            ours=max(our_points.values()),
            headline=True,
            reasons=REASONS,
            facts=", ".join(f"{rate:g}/s: {value:+.1f}" for rate, value in points.items()),
        ),
        PaperClaim(
            name="recomputed tokens fewer than LRU's, share, where LRU hits less than 95 %",
            goal=FEWER,
            kind="up to",
            value=max(fewer.values()),
            ours=max(our_fewer.values()),
            headline=True,
            reasons=REASONS,
            facts=", ".join(f"{rate:g}/s: {value:+.1%}" for rate, value in fewer.items()),
        ),
    ]
    missed_from = {name: below(of, OFTEN_MISSED) for name, of in (("retention value", judged), ("LRU", lru))}
    return found + [
        PaperClaim(name=f"requests/s from which {name} hits less than 80 %", goal=MISSED_FROM_PER_S, value=rate)
        for name, rate in missed_from.items()
        if rate is not None
    ]


def below(of: Mapping[float, Metrics], share: float) -> float | None:
    """Return the rate from which the host hits less, interpolated; None: at none, or at all."""
    for low, high in pairwise(sorted(of)):
        above, under = of[low][HIT], of[high][HIT]
        if above >= share > under:
            return low + (above - share) / (above - under) * (high - low)
    return None
