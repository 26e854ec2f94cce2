"""ALISE, Figure 8: what becomes of the KV of preempted jobs, OPT-13B on Alpaca's lengths.

Question: how much is swapping worth against deferring new jobs (never preempting) and against recomputing KV?
Method: the same trace, scheduler and lengths at several rates around the one at which vLLM-2023 reaches 200 ms/token;
only what is done with KV differs. Strategies of the paper (row alise-published) preempt whenever a better job waits;
ours ask whether that pays. Swapped KV goes over a PCIe 3 link's model, in 16 or 8 bits, in chunks of 16 tokens: of a
request of some 80 tokens, whole chunks of the default size (64 in 8 bits) hold too little, which a row shows.

    vllm-ext repro alise-fig8 --quick
    vllm-ext repro alise-fig8 --out benchmarks/results/repro/alise-fig8.json
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from vllm_ext.config_kv import EARLY
from vllm_ext.repro.bench import Bench, Limit
from vllm_ext.repro.studies import alise as base
from vllm_ext.repro.study import Claim, Findings, Plot, Study
from vllm_ext.simulation.spec import SimulationSpec

MODEL, DATASET = "opt-13b", "alpaca"
LOADS = (0.9, 1.1, 1.3, 1.5, 1.7)
QUICK_LOADS = (1.1, 1.5)
DURATION_S, QUICK_S = 300.0, 40.0
OVER_DEFER, OVER_RECOMPUTE = 1.8, 2.8
"""The paper's largest ratios of normalised latency at one rate."""

_FULL = 1024
"""Seats: memory is to be what is short, as in the paper."""


def _strategy(
    name: str, system: str = "alise-published", *, bits: int | None = None, **options: Mapping[str, Any]
) -> base.Contender:
    tier = {} if bits is None else {**base.TIER["kv_tier"], "bits": bits, "store": EARLY, **options.pop("kv_tier", {})}
    return base.Contender(
        name=name,
        system=system,
        options={"ordering": base.LATE_AGING, **({"kv_tier": tier} if tier else {}), **options},
        engine={"max_num_seqs": _FULL},
        error=base.PAPER_ERROR[DATASET],
    )


DEFER = _strategy("Defer", admission={"preempt": False})
RECOMPUTE = _strategy("Recompute")
SWAP_16 = _strategy("swap, 16 bits", bits=16)
SWAP_8 = _strategy("swap, 8 bits", bits=8)
SWAP_8_LARGE = _strategy("swap, 8 bits, chunks of 64", bits=8, kv_tier={"chunk_tokens": 64})
PRICED_RECOMPUTE = _strategy("Recompute where that pays", "alise")
PRICED_8 = _strategy("ours: keep, swap or recompute, 8 bits", "alise", bits=8)
SHOWN = (DEFER, RECOMPUTE, SWAP_16, SWAP_8, SWAP_8_LARGE, PRICED_RECOMPUTE, PRICED_8)


def run(bench: Bench) -> Findings:
    """Measure every strategy at every rate."""
    duration_s = QUICK_S if bench.quick else DURATION_S
    loads = QUICK_LOADS if bench.quick else LOADS

    def spec(contender: base.Contender, rate: float) -> SimulationSpec:
        return base.spec(contender, MODEL, DATASET, rate, duration_s=duration_s, seed=bench.seed)

    edge = bench.crossings(
        {base.VLLM_2023.name: partial(spec, base.VLLM_2023)},
        Limit(metric=base.NORMALISED, value=200.0),
        start_per_s={base.VLLM_2023.name: 14.0},
        tolerance=0.1,
    )[base.VLLM_2023.name].rate_per_s
    specs = {(load, c.name): spec(c, load * edge) for load in loads for c in SHOWN}
    measured = bench.metrics(specs)
    latency = {key: metrics[base.NORMALISED] for key, metrics in measured.items()}
    rows = [(f"{load:g} x {edge:.3g} req/s", *(latency[load, c.name] for c in SHOWN)) for load in loads]
    return Findings(
        header=("rate", *(f"{c.name}, ms/token" for c in SHOWN)),
        rows=rows,
        claims=_claims(latency, loads),
        metrics={
            "rate_at_200ms_per_s": edge,
            **{
                f"load_{load:g}.{c.name}.{metric}": measured[load, c.name][metric]
                for load in loads
                for c in (SWAP_16, SWAP_8, SWAP_8_LARGE, PRICED_8)
                for metric in (base.NORMALISED, "preemptions", "transfer_load_bytes", "transfer_waited_s")
                if metric in measured[load, c.name]
            },
        },
        baselines={
            c.name: {f"load_{load:g}.{base.NORMALISED}": latency[load, c.name] for load in loads}
            for c in (DEFER, RECOMPUTE, PRICED_RECOMPUTE)
        },
        config={
            "duration_s": duration_s,
            "host_gib": base.TIER["kv_tier"]["gib"],
            "seats": _FULL,
            "loads": list(loads),
        },
        plots=[Plot(suffix="", draw=partial(_draw, latency, loads, edge))],
        **base.workload(DATASET),
    )


def _claims(latency: Mapping[tuple[float, str], float], loads: tuple[float, ...]) -> list[Claim]:
    claims = []
    for strategy, headline in ((SWAP_8, True), (PRICED_8, False)):
        for other, figure in ((DEFER, OVER_DEFER), (RECOMPUTE, OVER_RECOMPUTE)):
            ratios = {load: latency[load, other.name] / latency[load, strategy.name] for load in loads}
            best = max(ratios, key=ratios.__getitem__)
            claims.append(
                Claim(
                    name=f"largest ratio of mean normalised latency, {other.name} / {strategy.name}",
                    paper=figure,
                    ours=ratios[best],
                    headline=headline,
                    note=f"at {best:g} times the rate; by rate: "
                    + ", ".join(f"{load:g}: {ratio:.2f}" for load, ratio in ratios.items()),
                )
            )
    return claims


def _draw(latency: Mapping[tuple[float, str], float], loads: tuple[float, ...], edge: float, path: Path) -> None:
    from vllm_ext.observability.plots import Series, lines

    lines(
        [
            Series(label=c.name, x=[load * edge for load in loads], y=[latency[load, c.name] for load in loads])
            for c in SHOWN
        ],
        path,
        xlabel="request rate (1/s)",
        ylabel="mean normalised latency (ms/token)",
        title=f"{MODEL}, {DATASET} lengths, simulated V100",
    )


STUDY = Study(
    id="alise-fig8",
    paper=f"{base.PAPER}, Figure 8",
    title="Defer, Recompute and swapping of preempted KV over the request rate",
    row="alise-published",
    differences=(
        "Strategies of the paper are the row alise-published with what becomes of KV as named; those where it has to "
        "pay are alise.",
        *(text for text in base.DIFFERENCES if "alise-published" not in text),
        "One model of the figure's three. 1024 seats, so that memory is what is short; 64 GiB of host memory behind a "
        "PCIe 3 link of 12 GB/s.",
        "KV is copied in whole chunks of 16 tokens as soon as they are full; the rest of a preempted request is "
        "computed again. A resuming request waits for its KV while others run.",
        "Computing KV again is cheaper than it was: prompts and decodes share steps today, and a request of this data "
        "set has some 80 tokens. At 0.9 times the rate nobody is preempted and a token takes 47 ms, at 1.3 times it "
        "takes 73 with Defer and 80 with Recompute: no way of swapping could gain more than 1.6 and 1.7 there.",
        "The time that quantising takes is not modelled: it runs on the device beside the copies.",
    ),
    run=run,
)
