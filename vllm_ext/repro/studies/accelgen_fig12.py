"""AccelGen, Figure 12: what each of its three methods contributes.

Question: what is lost without dynamic chunking (/Chunk), without the order by remaining time (/Order), and without the
match of compute and memory (/Batch)?
Method: the window of Figure 11, for AccelGen and its ablations; the mean over the models of what each loses.

    vllm-ext repro accelgen-fig12 --quick
    vllm-ext repro accelgen-fig12 --out benchmarks/results/repro/accelgen-fig12.json
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from vllm_ext.repro.bench import Bench
from vllm_ext.repro.studies import accelgen as base
from vllm_ext.repro.studies.accelgen_measure import Observed, observe_all
from vllm_ext.repro.study import Claim, Findings, Plot, Study

FULL = base.Load(arrivals_s=180.0, drain_s=60.0)
QUICK = base.Load(arrivals_s=40.0, drain_s=20.0)
Compare = Callable[[Observed, Observed], float]


def _lost(key: str) -> Compare:
    return lambda whole, part: 1 - part[key] / max(whole[key], 1e-9)


def _grown(key: str) -> Compare:
    return lambda whole, part: part[key] / max(whole[key], 1e-9) - 1


def _points(key: str, sign: float = 1.0) -> Compare:
    return lambda whole, part: sign * (whole[key] - part[key])


CLAIMS: tuple[tuple[str, Compare, tuple[float, float, float], bool], ...] = (
    ("output tokens/s lost, fraction", _lost("output_tokens_per_s"), (0.97, 0.35, 0.61), True),
    ("goodput lost, fraction", _lost("goodput_tokens_per_s"), (0.44, 0.52, 0.27), True),
    ("attainment of iterations lost, fraction of all", _points("attainment_fraction"), (0.28, 0.42, 0.24), True),
    ("mean JCT grown, fraction", _grown("jct_mean_s"), (0.31, 0.17, 0.19), False),
    ("KV in use lost, fraction of all", _points("unallocated_kv_fraction", -1.0), (0.07, 0.01, 0.11), False),
)
"""What is compared, the paper's figures in the order of `accelgen.ABLATIONS`, and whether it is a headline."""
COLUMNS = {
    "req/s": "requests_per_s",
    "tok/s": "output_tokens_per_s",
    "goodput tok/s": "goodput_tokens_per_s",
    "in time": "attainment_fraction",
    "by deadline": "deadline_attainment_fraction",
    "whole req. met": "request_attainment_fraction",
    "JCT s": "jct_mean_s",
    "tokens/step": "tokens_per_step",
    "KV unallocated": "unallocated_kv_fraction",
    "preemptions": "preemptions",
}


def run(bench: Bench) -> Findings:
    """Measure AccelGen and its ablations on every model."""
    load = QUICK if bench.quick else FULL
    panels = (base.OPT_13B, base.LLAMA_70B) if bench.quick else base.PANELS
    contenders = {base.ACCELGEN.name: base.ACCELGEN, **base.ABLATIONS}
    found = observe_all(
        {(p.name, name): base.spec(c, p, load, bench.seed) for p in panels for name, c in contenders.items()}
    )
    names = [panel.name for panel in panels]
    metrics: dict[str, float] = {}
    baselines: dict[str, dict[str, float]] = {}
    for (panel, name), observed in found.items():
        kept = {f"{panel}.{key}": observed[key] for key in COLUMNS.values()}
        if name == base.ACCELGEN.name:
            metrics.update(kept)
        else:
            baselines.setdefault(name, {}).update(kept)
    return Findings(
        header=("model", "system", *COLUMNS),
        rows=[(panel, name, *(one[key] for key in COLUMNS.values())) for (panel, name), one in found.items()],
        claims=_claims(found, names),
        metrics=metrics,
        baselines=baselines,
        config={
            "arrivals_s": load.arrivals_s,
            "window_s": load.window_s,
            "rate_per_s": load.rate_per_s,
            "books_share": load.books,
        },
        plots=[Plot(suffix="", draw=partial(_draw, found, names))],
        **base.described_workload(panels[0], load, bench.seed),
    )


def _claims(found: Mapping[tuple[str, str], Observed], panels: list[str]) -> list[Claim]:
    claims = []
    for name, compare, figures, headline in CLAIMS:
        for ablation, paper in zip(base.ABLATIONS, figures, strict=True):
            each = {p: compare(found[p, base.ACCELGEN.name], found[p, ablation]) for p in panels}
            ours = statistics.fmean(each.values())
            claims.append(
                Claim(
                    name=f"{ablation}: {name}",
                    paper=paper,
                    ours=ours,
                    headline=headline,
                    note=", ".join(f"{panel} {value:.2f}" for panel, value in each.items())
                    + ("" if ours >= paper else f"; {_REASON[ablation]}"),
                )
            )
    return claims


_REASON = {
    "without Chunk": "not traced; its steps have fewer tokens (see the table), so decodes wait less",
    "without Order": "not traced; a supposition: almost all are late at once, and lateness orders much as arrival does",
    "without Batch": "not traced; a supposition: the order of the queue already decides whom the match may choose from",
}


def _draw(found: Mapping[tuple[str, str], Observed], panels: list[str], path: Path) -> None:
    from vllm_ext.observability.plots import bars

    names = [base.ACCELGEN.name, *base.ABLATIONS]
    heights = {name: [found[panel, name]["goodput_tokens_per_s"] for panel in panels] for name in names}
    bars(panels, heights, path, ylabel="tokens/s in time", title="AccelGen without one of its methods")


STUDY = Study(
    id="accelgen-fig12",
    paper=f"{base.PAPER}, Figure 12",
    title="AccelGen without dynamic chunking, ordering or matching",
    row="accelgen-published",
    differences=(
        *base.DIFFERENCES,
        "The paper's figures are one number per ablation; ours are means over the models, with each model's in the "
        "note. A claim is reached if the method contributes at least as much as in the paper.",
    ),
    run=run,
)
