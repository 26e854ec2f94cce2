"""AccelGen, Figures 11 to 13: one window of time, the same arrivals, lengths and objectives for every system."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from vllm_ext.experiments.experiment import Findings, bar_plot, flat
from vllm_ext.experiments.papers import accelgen as base
from vllm_ext.experiments.papers.accelgen_window import observe_all
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.claim import Claim
from vllm_ext.report.table import Table

FULL = base.Load(arrivals_s=180.0, drain_s=60.0)
QUICK = base.Load(arrivals_s=40.0, drain_s=20.0)
TOKENS, GOODPUT, REQUESTS = "output_tokens_per_s", "goodput_tokens_per_s", "requests_per_s"
IN_TIME, DEADLINE = "attainment_fraction", "deadline_attainment_fraction"
JCT, FORWARD, UNALLOCATED = "jct_mean_s", "forward_over_pivot_fraction", "unallocated_kv_fraction"
LABELS = {
    REQUESTS: "req/s",
    TOKENS: "tok/s",
    GOODPUT: "goodput tok/s",
    IN_TIME: "in time",
    DEADLINE: "by deadline",
    "request_attainment_fraction": "whole req. met",
    "ttft_attainment_fraction": "TTFT met",
    JCT: "JCT s",
    FORWARD: "step / S_pf",
    "tokens_per_step": "tokens/step",
    "device_busy_fraction": "device busy",
    UNALLOCATED: "KV unallocated",
    "preemptions": "preemptions",
    "processed_tokens_per_s": "all tok/s",
}
"""Metrics of a window -> their columns."""
Observed = Mapping[str, float]
Compare = Callable[[Observed, Observed], float]
"""From AccelGen's window and another's to one number."""


def over(key: str) -> Compare:
    """Ours over theirs."""
    return lambda ours, theirs: ours[key] / max(theirs[key], 1e-9)


def under(key: str) -> Compare:
    """Theirs over ours."""
    return lambda ours, theirs: theirs[key] / max(ours[key], 1e-9)


def lost(key: str) -> Compare:
    """What theirs lacks, as a fraction of ours."""
    return lambda ours, theirs: 1 - theirs[key] / max(ours[key], 1e-9)


def grown(key: str) -> Compare:
    """By what fraction theirs is more than ours."""
    return lambda ours, theirs: theirs[key] / max(ours[key], 1e-9) - 1


def points(key: str, factor: float = 1.0) -> Compare:
    """Ours less theirs, times a factor."""
    return lambda ours, theirs: factor * (ours[key] - theirs[key])


def setting(runner: Runner) -> tuple[base.Load, Sequence[base.Panel], dict[str, float]]:
    """Return load and models of Figures 11 and 12, and what a result says of the load."""
    load, panels = (QUICK, (base.OPT_13B, base.LLAMA_70B)) if runner.quick else (FULL, base.PANELS)
    told = {"rate_per_s": load.rate_per_s, "books_share": load.books}
    return load, panels, {"arrivals_s": load.arrivals_s, "window_s": load.window_s, **told}


def table(
    found: Mapping[tuple[Any, ...], Observed],
    columns: Sequence[str],
    dims: Sequence[str] = ("model", "system"),
    where: Callable[..., str] = "{}.".format,
    kept: Collection[str] = (),
) -> dict[str, Any]:
    """Return tables, metrics and baselines, fields of `Findings`; ``kept`` are metrics if they are not the columns."""
    rows = [(*key, *(one[name] for name in columns)) for key, one in found.items()]
    return {
        "tables": [Table((*dims, *(LABELS[name] for name in columns)), rows)],
        **flat(
            {key: {name: one[name] for name in kept or columns} for key, one in found.items()},
            where,
            own={base.ACCELGEN.name: ""},
        ),
    }


# --- Figure 11 --------------------------------------------------------------------------------------------------------

RANGES: tuple[tuple[str, Compare, float, float, bool], ...] = (
    ("output tokens/s, AccelGen / baseline", over(TOKENS), 1.42, 11.21, True),
    ("requests/s, AccelGen / baseline", over(REQUESTS), 1.54, 10.0, False),
    ("goodput, AccelGen / baseline", over(GOODPUT), 1.43, 13.71, True),
    ("attainment of iterations, AccelGen - baseline, points", points(IN_TIME, 100), 37, 90, True),
    ("complete by the deadline, AccelGen - baseline, points", points(DEADLINE, 100), 34, 93, False),
    ("mean JCT, baseline / AccelGen", under(JCT), 1.61, 12.22, True),
    ("step over S_pf, AccelGen - baseline, points", points(FORWARD, 100), 31, 63, False),
    ("KV allocated, AccelGen - baseline, points", points(UNALLOCATED, -100), 7.4, 13.2, False),
)
"""What is compared, the paper's least and largest figure over baselines and models, and whether it is a headline."""
FIG11_COLUMNS = [name for name in LABELS if name not in ("tokens_per_step", "processed_tokens_per_s")]


@base.PAPER.figure(
    "accelgen-fig11",
    "Figure 11",
    "Throughput, goodput, SLO attainment and JCT with heterogeneous objectives, four models",
    (
        *base.DIFFERENCES,
        "Utilisation of compute is tokens of a step over S_pf; device busy is the share of the window in which the "
        "device computes, which is all of it under overload. JCT is the mean of those that finished: who serves short "
        "requests only finishes early; jct_to_window_end_mean_s counts everybody.",
        "A baseline that finished nothing within the window is left out of the claims for its model; see the table.",
        "The paper's vLLM, Orca, FastGen, Sarathi-Serve and FastServe are the baselines of the claims; vLLM 0.32's "
        "default and a tuned one (steps that keep the tightest TBT objective, 5 % watermark) stand beside them.",
    ),
)
def fig11(runner: Runner) -> Findings:
    """What do objectives per request, an order by the time left, and matched compute and memory gain?

    Over systems that know neither, when short and long prompts with different objectives arrive faster than anybody can
    serve them. Method: per model AccelGen over each of the paper's baselines; the least and the largest ratio stand
    beside the paper's range.
    """
    load, panels, told = setting(runner)
    names = [panel.name for panel in panels]
    found = observe_all(
        {
            (panel.name, c.name): base.spec(c, panel, load, runner.seed)
            for panel in panels
            for c in (
                *base.baselines(panel),
                base.UPSTREAM,
                base.tuned(panel),
                base.ACCELGEN,
                base.ORACLE,
                base.OURS,
                *base.READINGS,
            )
        }
    )
    pivots = {panel.name: panel.pivot_tokens for panel in panels}
    for (panel, _), one in found.items():
        one[FORWARD] = one["tokens_per_step"] / pivots[panel]
    systems = list(dict.fromkeys(name for _, name in found if name != base.ORACLE.name))
    plots = {
        "throughput": (TOKENS, "output tokens/s"),
        "goodput": (GOODPUT, "tokens/s in time"),
        "attainment": (IN_TIME, "tokens in time, share of those delivered"),
        "jct": (JCT, "mean JCT (s)"),
    }
    return Findings(
        **table(found, FIG11_COLUMNS, kept=next(iter(found.values())).keys() - {"wall_s_per_step"}),
        claims=list(_fig11_claims(found, names, [c.name for c in base.baselines(panels[0])])),
        config={
            **told,
            "kv_tokens": {panel.name: panel.kv_tokens for panel in panels},
            "pivot_tokens": pivots,
            "first_bucket_ttft_ms": {panel.name: 1000 * base.ttft_buckets(panel)[0] for panel in panels},
        },
        details={"utilisation": {panel.name: base.utilisation(panel, load, runner.seed) for panel in panels}},
        plots=[
            bar_plot(
                f"-{suffix}",
                names,
                {name: [found[panel, name][key] for panel in names] for name in systems},
                ylabel=label,
                title="8 requests/s, 35 % books, simulated A100",
            )
            for suffix, (key, label) in plots.items()
        ],
        workload=[base.workload_spec(panels[0], load, runner.seed)],
    )


def _fig11_claims(
    found: Mapping[tuple[str, str], Observed], panels: Sequence[str], others: Sequence[str]
) -> Iterator[Claim]:
    ours = {panel: found[panel, base.ACCELGEN.name] for panel in panels}
    for name, compare, least, largest, headline in RANGES:
        pairs = {
            (panel, other): compare(ours[panel], found[panel, other])
            for panel in panels
            for other in others
            if found[panel, other]["finished_requests"]
        }
        for which, paper, pick in (("least", least, min), ("largest", largest, max)):
            panel, other = pick(pairs, key=pairs.__getitem__)
            yield Claim(
                name=f"{name}, {which}",
                goal=paper,
                value=pairs[panel, other],
                headline=headline,
                facts=f"against {other} on {panel}",
                why=_fig11_why(name, ours[panel], found[panel, other]),
            )
    yield Claim(
        name="output tokens/s, AccelGen / Oracle, least of the models",
        goal=0.88,
        value=min(over(TOKENS)(one, found[panel, base.ORACLE.name]) for panel, one in ours.items()),
        facts="the Oracle here is AccelGen with true lengths, not a search",
    )
    yield Claim(
        name="scheduling of a step / mean JCT, %, largest of the models (upper bound, wall clock)",
        goal=0.02,
        value=max(100 * one["wall_s_per_step"] / one[JCT] for one in ours.values()),
        op="<=",
        facts="all that the simulation does per step, vLLM's own scheduler included; JCT is simulated",
    )


def _fig11_why(name: str, ours: Observed, theirs: Observed) -> str:
    """Say why a figure falls short, with numbers."""
    if "iterations" in name:
        return (
            f"{theirs[IN_TIME]:.1%} of its tokens come in time: steps are short where memory bounds the "
            f"batch, or the budget keeps them so; ours {ours[IN_TIME]:.1%}"
        )
    if "JCT" in name:
        return (
            f"of those that finished: {theirs['finished_requests']:.0f} with it, {ours['finished_requests']:.0f} with "
            f"AccelGen"
        )
    if "S_pf" in name:
        return "AccelGen's steps are bounded by the tightest TBT objective, the baseline's are not, or by memory"
    return (
        f"{theirs['tokens_per_step']:.0f} tokens a step with it, {ours['tokens_per_step']:.0f} with AccelGen; "
        f"{theirs['preemptions']:.0f} and {ours['preemptions']:.0f} preemptions"
    )


# --- Figure 12 --------------------------------------------------------------------------------------------------------

LOST: tuple[tuple[str, Compare, tuple[float, float, float], bool], ...] = (
    ("output tokens/s lost, fraction", lost(TOKENS), (0.97, 0.35, 0.61), True),
    ("goodput lost, fraction", lost(GOODPUT), (0.44, 0.52, 0.27), True),
    ("attainment of iterations lost, fraction of all", points(IN_TIME), (0.28, 0.42, 0.24), True),
    ("mean JCT grown, fraction", grown(JCT), (0.31, 0.17, 0.19), False),
    ("KV in use lost, fraction of all", points(UNALLOCATED, -1.0), (0.07, 0.01, 0.11), False),
)
"""What is compared, the paper's figures in the order of `ABLATIONS`, and whether it is a headline."""
FIG12_WHY = (
    "not traced; its steps have fewer tokens (see the table), so decodes wait less",
    "not traced; a supposition: almost all are late at once, and lateness orders much as arrival does",
    "not traced; a supposition: the order of the queue already decides whom the match may choose from",
)
FIG12_COLUMNS = [
    name
    for name in LABELS
    if name not in ("ttft_attainment_fraction", FORWARD, "device_busy_fraction", "processed_tokens_per_s")
]


@base.PAPER.figure(
    "accelgen-fig12",
    "Figure 12",
    "AccelGen without dynamic chunking, ordering or matching",
    (
        *base.DIFFERENCES,
        "The paper's figures are one number per ablation; ours are means over the models, with each model's in the "
        "note. A claim is reached if the method contributes at least as much as in the paper.",
    ),
)
def fig12(runner: Runner) -> Findings:
    """What is lost without dynamic chunking (/Chunk), the order by remaining time (/Order), or the match (/Batch)?

    Method: the window of Figure 11, for AccelGen and its ablations; the mean over the models of what each loses.
    """
    load, panels, told = setting(runner)
    names = [panel.name for panel in panels]
    found = observe_all(
        {
            (panel.name, c.name): base.spec(c, panel, load, runner.seed)
            for panel in panels
            for c in (base.ACCELGEN, *base.ABLATIONS)
        }
    )
    claims = []
    for name, compare, figures, headline in LOST:
        for ablation, paper, why in zip(base.ABLATIONS, figures, FIG12_WHY, strict=True):
            each = {p: compare(found[p, base.ACCELGEN.name], found[p, ablation.name]) for p in names}
            claims.append(
                Claim(
                    name=f"{ablation.name}: {name}",
                    goal=paper,
                    value=statistics.fmean(each.values()),
                    headline=headline,
                    facts=", ".join(f"{panel} {value:.2f}" for panel, value in each.items()),
                    why=why,
                )
            )
    return Findings(
        **table(found, FIG12_COLUMNS),
        claims=claims,
        config=told,
        plots=[
            bar_plot(
                "",
                names,
                {c.name: [found[panel, c.name][GOODPUT] for panel in names] for c in (base.ACCELGEN, *base.ABLATIONS)},
                ylabel="tokens/s in time",
                title="AccelGen without one of its methods",
            )
        ],
        workload=[base.workload_spec(panels[0], load, runner.seed)],
    )
