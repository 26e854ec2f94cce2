"""Pensieve, Figure 3.14: which KV is dropped, OPT-13B.

Question: what is the retention value worth against the least recently used, with leading ends dropped or tails?
Method: the same server over several rates, only the eviction policy of its host memory differs; all store ahead of
time, load within steps, and compute across gaps; our row is beside them. The share of what left the device that the
host still has, and the tokens of histories that are computed again, are compared at each rate.

    vllm-ext repro pensieve-fig14 --quick
    vllm-ext repro pensieve-fig14 --out benchmarks/results/repro/pensieve-fig14.json
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from vllm_ext.repro.bench import Bench, Metrics
from vllm_ext.repro.studies import pensieve as base
from vllm_ext.repro.study import Claim, Findings, Plot, Study

SETTING = base.Setting(model="opt-13b")
RATES = (2.0, 3.0, 3.5, 4.0, 4.5, 5.0)
QUICK_RATES = (3.0, 4.5)
QUICK_HOST_SHARE = 0.1
"""Of the host's memory: in a short run little of it would be used."""
HIT_POINTS, FEWER = 4.4, 0.146
"""The paper's largest: percentage points of the host's hit rate, and share of recomputed tokens, against LRU."""
UNDER_PRESSURE = 0.95
"""LRU's hit rate below which there is something to gain."""

JUDGED = base.PENSIEVE
LRU = base.Contender(name="LRU", system=base.ROW, tier={"policy": "lru"})
OTHERS = (
    LRU,
    base.Contender(name="ARC", system=base.ROW, tier={"policy": "arc"}),
    base.Contender(name="tail, least recently used", system=base.ROW, tier={"policy": "tail"}),
    base.Contender(name="tail, retention value", system=base.ROW, tier={"policy": "retention"}),
    base.BY_TURNS,
    base.OURS,
)
SHOWN = (JUDGED, *OTHERS)

Found = Mapping[tuple[float, str], Metrics]


def run(bench: Bench) -> Findings:
    """Measure every policy at every rate."""
    rates = QUICK_RATES if bench.quick else RATES
    duration_s = base.QUICK_S if bench.quick else base.DURATION_S
    share = QUICK_HOST_SHARE if bench.quick else 1.0
    found = bench.metrics(
        {
            (rate, c.name): base.spec(c, SETTING, rate, duration_s=duration_s, seed=bench.seed, host_share=share)
            for rate in rates
            for c in SHOWN
        }
    )
    return Findings(
        header=("requests/s", "policy", "host hit rate", "history found", "recomputed tokens", "P90 ms/token"),
        rows=[(rate, c.name, *_figures(found[rate, c.name]).values()) for rate in rates for c in SHOWN],
        claims=_claims(found, rates),
        metrics=_flat(found, rates, JUDGED),
        baselines={c.name: _flat(found, rates, c) for c in OTHERS},
        config={**base.config(SHOWN, duration_s=duration_s), "rates_per_s": list(rates), "host_share": share},
        plots=[Plot(suffix="", draw=partial(_draw, found, rates))],
        **base.workload(),
    )


def _figures(metrics: Metrics) -> dict[str, float]:
    computed, loaded = metrics["history_computed_tokens"], metrics["tier_hit_tokens"]
    return {
        "host_hit_fraction": loaded / max(loaded + computed, 1.0),
        base.FOUND: metrics[base.FOUND],
        "history_computed_tokens": computed,
        base.P90: metrics[base.P90],
    }


def _flat(found: Found, rates: tuple[float, ...], contender: base.Contender) -> dict[str, float]:
    return {
        f"rate_{rate:g}.{name}": value
        for rate in rates
        for name, value in _figures(found[rate, contender.name]).items()
    }


def _claims(found: Found, rates: tuple[float, ...]) -> list[Claim]:
    ours, lru = ({rate: _figures(found[rate, c.name]) for rate in rates} for c in (JUDGED, LRU))
    points = {rate: 100 * (ours[rate]["host_hit_fraction"] - lru[rate]["host_hit_fraction"]) for rate in rates}
    pressed = [rate for rate in rates if lru[rate]["host_hit_fraction"] < UNDER_PRESSURE] or [rates[-1]]
    fewer = {
        rate: 1 - ours[rate]["history_computed_tokens"] / max(lru[rate]["history_computed_tokens"], 1.0)
        for rate in pressed
    }
    by_rate = ", ".join(f"{rate:g}/s: {value:+.1f}" for rate, value in points.items())
    by_pressed = ", ".join(f"{rate:g}/s: {value:+.1%}" for rate, value in fewer.items())
    return [
        Claim(
            name="host hit rate, percentage points above LRU, largest over the rates",
            paper=HIT_POINTS,
            ours=max(points.values()),
            headline=True,
            note=by_rate,
        ),
        Claim(
            name="recomputed tokens fewer than LRU's, largest share where LRU hits less than 95 %",
            paper=FEWER,
            ours=max(fewer.values()),
            headline=True,
            note=by_pressed,
        ),
    ]


def _draw(found: Found, rates: tuple[float, ...], path: Path) -> None:
    from vllm_ext.observability.plots import Series, lines

    lines(
        [
            Series(label=c.name, x=list(rates), y=[_figures(found[r, c.name])["host_hit_fraction"] for r in rates])
            for c in SHOWN
        ],
        path,
        xlabel="turns (1/s)",
        ylabel="host hit rate",
        title="OPT-13B, simulated A100-80GB, 220 GB in the host",
    )


STUDY = Study(
    id="pensieve-fig14",
    paper=f"{base.PAPER}, Figure 3.14",
    title="Retention value against LRU and ARC: host hit rate and recomputed tokens",
    row="pensieve-published",
    differences=(
        *base.DIFFERENCES,
        "The host's hit rate is what it gave over what the device did not have: tokens loaded over tokens loaded or "
        "computed again of histories.",
    ),
    run=run,
)
