"""AccelGen, Figures 11 and 12: one window of time, the same arrivals, lengths and objectives for every system."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm_ext.experiments.experiment import Findings, Variant, bar_plot, flat
from vllm_ext.experiments.grid import Metrics
from vllm_ext.experiments.papers import accelgen as base
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.claim import WITHIN, PaperClaim, Reason, Verdict
from vllm_ext.report.table import Table

FULL = base.Load(arrivals_s=180.0, drain_s=60.0)
QUICK = base.Load(arrivals_s=40.0, drain_s=20.0)
TOKENS, GOODPUT, REQUESTS = "delivered_tokens_per_s", "tokens_in_time_per_s", "ended_requests_per_s"
IN_TIME, DEADLINE = "tokens_in_time_fraction", "deadline_attainment_fraction"
JCT, STEP, KV_USED = "jct_mean_s", "tokens_per_step", "mean_kv_used_fraction"
STEPS, WAIT = "steps_per_s", "scheduling_delay_p99_s"
LABELS = {
    REQUESTS: "req/s",
    TOKENS: "tok/s",
    GOODPUT: "goodput tok/s",
    IN_TIME: "in time",
    DEADLINE: "by deadline",
    "request_attainment_fraction": "whole req. met",
    "first_in_time_fraction": "TTFT met",
    JCT: "JCT s",
    "jct_to_end_mean_s": "JCT of all s",
    WAIT: "P99 wait s",
    STEP: "tokens/step",
    STEPS: "steps/s",
    "device_busy_fraction": "device busy",
    KV_USED: "KV in use",
    "preemptions": "preemptions",
}
"""Metrics of a window -> their columns; who has finished nothing has no wait."""
Compare = Callable[[Metrics, Metrics], float]
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


def fewer(key: str) -> Compare:
    """By what fraction ours is more than theirs: of steps per second, how much longer theirs take."""
    return lambda ours, theirs: ours[key] / max(theirs[key], 1e-9) - 1


def points(key: str, factor: float = 1.0) -> Compare:
    """Ours less theirs, times a factor."""
    return lambda ours, theirs: factor * (ours[key] - theirs[key])


def setting(runner: Runner) -> tuple[base.Load, Sequence[base.Panel], dict[str, float]]:
    """Return load and models of Figures 11 and 12, and what a result says of the load."""
    load, panels = (QUICK, (base.OPT_13B, base.LLAMA_70B)) if runner.quick else (FULL, base.PANELS)
    told = {"rate_per_s": load.rate_per_s, "books_share": load.books}
    return load, panels, {"arrivals_s": load.arrivals_s, "window_s": load.window_s, **told}


def table(
    found: Mapping[tuple[Any, ...], Metrics],
    dims: Sequence[str],
    columns: Sequence[str] = tuple(LABELS),
    title: str = "",
) -> Table:
    """Return windows as rows: their keys, then the columns."""
    rows = [(*key, *(one.get(name) for name in columns)) for key, one in found.items()]
    return Table((*dims, *(LABELS[name] for name in columns)), rows, title)


def values(
    found: Mapping[tuple[Any, ...], Metrics], where: Callable[..., str], columns: Sequence[str] = tuple(LABELS)
) -> dict[str, Any]:
    """Return ``metrics`` and ``baselines``, fields of `Findings`."""
    kept = {
        key: {name: value for name in columns if (value := one.get(name)) is not None} for key, one in found.items()
    }
    return flat(kept, where, own={base.ACCELGEN.name: ""})


# --- Figure 11 --------------------------------------------------------------------------------------------------------

LOST_FIRST: Mapping[Verdict, Reason] = {
    "below": Reason("it serves first who has lost, which ours does not", f"row `{base.OURS.name}`")
}
"""Told only where ours has the paper's factor; else `NO_ORDER`."""
NO_ORDER: Mapping[Verdict, Reason] = {"below": Reason("no order reaches it here", "row `shortest prompt first`")}
TOO_MANY: Mapping[Verdict, Reason] = {
    "below": Reason("8 requests/s are beyond what any order serves here", "column `req/s`")
}
NOT_ENDED: Mapping[Verdict, Reason] = {
    "below": Reason("who does not finish in the window does not count", "columns `JCT s` and `JCT of all s`")
}
SHORT_STEPS: Mapping[Verdict, Reason] = {
    "below": Reason("its steps stay far below S_pf: objectives bound them", "column `tokens/step`")
}
FEW_RUN: Mapping[Verdict, Reason] = {
    "below": Reason("fewer run at once: objectives bound its steps", "column `tokens/step`"),
    "above": Reason("eight seats of Orca's leave KV unused", "row `Orca`"),
}
ALL_IN_TIME: Mapping[Verdict, Reason] = {
    "below": Reason("the baselines deliver most tokens in time here", "column `in time`")
}
ALL_SERVED: Mapping[Verdict, Reason] = {
    "below": Reason("below capacity every system serves what arrives", "table `near capacity`")
}
ALIKE: Mapping[Verdict, Reason] = {
    "not comparable": Reason("lengths decide nothing: nobody has a JCT objective", "row `Oracle`")
}
AGED: Mapping[Verdict, Reason] = {
    "tendency": Reason("one admission in ten goes to who waited 120 s", f"row `{base.OURS_UNAGED.name}`")
}
Ranged = tuple[str, Compare, float, float, Mapping[Verdict, Reason]]
"""What is compared, the paper's least and largest figure over baselines and models, and why ours may differ."""
FORWARD = "step over S_pf, AccelGen - baseline, points"
RANGES: tuple[Ranged, ...] = (
    ("goodput, AccelGen / baseline", over(GOODPUT), 1.43, 13.71, LOST_FIRST),
    ("output tokens/s, AccelGen / baseline", over(TOKENS), 1.42, 11.21, LOST_FIRST),
    ("requests/s, AccelGen / baseline", over(REQUESTS), 1.54, 10.0, LOST_FIRST),
    ("attainment of iterations, AccelGen - baseline, points", points(IN_TIME, 100), 37, 90, ALL_IN_TIME),
    ("complete by the deadline, AccelGen - baseline, points", points(DEADLINE, 100), 34, 93, TOO_MANY),
    ("mean JCT, baseline / AccelGen", under(JCT), 1.61, 12.22, NOT_ENDED),
    (FORWARD, points(STEP, 100), 31, 63, SHORT_STEPS),
    ("KV allocated, AccelGen - baseline, points", points(KV_USED, 100), 7.4, 13.2, FEW_RUN),
)
AT_NEAR: Ranged = ("goodput near capacity, AccelGen / baseline", over(GOODPUT), 1.43, 13.71, ALL_SERVED)
HEADLINES = ("goodput, AccelGen / baseline, least", "goodput, AccelGen / baseline, largest",
             "output tokens/s, AccelGen / baseline, least")  # fmt: skip
NEAR = ((base.LLAMA_70B, 1.0), (base.LLAMA_70B, 2.0), (base.OPT_13B, 0.5))
"""Models, and requests per second near what they can serve."""


@base.PAPER.figure(
    "accelgen-fig11",
    "Figure 11",
    "Throughput, goodput, SLO attainment and JCT with heterogeneous objectives, four models",
    (
        *base.DIFFERENCES,
        "Utilisation of compute is tokens of a step over S_pf (config.pivot_tokens); device busy is the share of the "
        "window in which the device computes, which is all of it under overload. JCT is the mean of those that "
        "finished: who serves short requests only finishes early; `JCT of all` counts everybody, to the window's end.",
        "A baseline that finished nothing within the window is left out of the claims for its model; see the table.",
        "The paper's vLLM, Orca, FastGen, Sarathi-Serve and FastServe are the baselines of the claims; vLLM 0.32's "
        "default and a tuned one (steps that keep the tightest TBT objective, 5 % watermark) stand beside them.",
        "Aging is ours: one admission in ten goes to who has waited 120 s. Rows beside it never age, or serve all of "
        "them first, as before there was a share. P99 wait is from arrival to the first step, of requests that "
        "finished in the window only: who still waits at its end does not count.",
        "The paper's 8 requests/s are an overload here. Goodput is judged near capacity too: Llama-3-70B at 1 and 2 "
        "requests/s, OPT-13B at 0.5.",
    ),
    repeats=5,
)
def fig11(runner: Runner) -> Findings:
    """What do objectives per request, an order by the time left, and matched compute and memory gain?

    Over systems that know neither, when short and long prompts with different objectives arrive faster than anybody can
    serve them. Method: per model AccelGen over each of the paper's baselines; the least and the largest ratio stand
    beside the paper's range. The same goodput ratios where most can be served, on two of the models.
    """
    load, panels, told = setting(runner)
    loads = {(panel.name, load.rate_per_s): (panel, load) for panel in panels}
    near = {(panel.name, rate): (panel, replace(load, rate_per_s=rate)) for panel, rate in NEAR}
    specs = {
        (*at, c.name): base.spec(c, panel, of, runner.seed)
        for rows in ((_judged,) if runner.judged_only else (_judged, _beside))
        for at, (panel, of) in (loads | near).items()
        for c in rows(panel, crowded=at not in near)
    }
    found = runner.metrics(specs)
    crowded, mild = ({key: one for key, one in found.items() if key[:2] in of} for of in (loads, near))
    pivots = {panel.name: panel.pivot_tokens for panel in panels}
    dims, names = ("model", "offered/s", "system"), [panel.name for panel in panels]
    systems = dict.fromkeys(name for *_, name in crowded if name != base.ORACLE.name)
    plots = {
        "throughput": (TOKENS, "output tokens/s"),
        "goodput": (GOODPUT, "tokens/s in time"),
        "attainment": (IN_TIME, "tokens in time, share of those delivered"),
        "jct": (JCT, "mean JCT (s)"),
    }
    return Findings(
        tables=[table(crowded, dims), table(mild, dims, title="near capacity")],
        **values(found, "{} at {:g}/s.".format),
        claims=[*(claim for one in RANGES for claim in _ranged(one, crowded, pivots)), *_ranged(AT_NEAR, mild, pivots),
                *_beside_oracle(crowded), _over_tuned(crowded, ""), _over_tuned(mild, " near capacity"),
                *_aging(crowded, ""), *_aging(mild, " near capacity")],
        config={
            **told,
            "kv_tokens": {panel.name: panel.kv_tokens for panel in panels},
            "pivot_tokens": pivots,
            "first_bucket_ttft_ms": {panel.name: 1000 * base.ttft_buckets(panel)[0] for panel in panels},
        },
        details={
            "utilisation": {
                f"{panel.name} at {of.rate_per_s:g}/s": base.utilisation(panel, of, runner.seed)
                for panel, of in (loads | near).values()
            }
        },
        plots=[
            bar_plot(
                f"-{suffix}",
                names,
                {name: [crowded[panel, load.rate_per_s, name][key] for panel in names] for name in systems},
                ylabel=label,
                title="8 requests/s, 35 % books, simulated A100",
            )
            for suffix, (key, label) in plots.items()
        ],
        workload=[base.workload_spec(panels[0], load, runner.seed)],
    )  # fmt: skip


def _judged(panel: base.Panel, *, crowded: bool) -> tuple[Variant, ...]:
    """Whom claims compare."""
    rows = (*base.baselines(panel), base.tuned(panel), base.ACCELGEN, base.RELEGATED, base.OURS, base.OURS_UNAGED)
    return (*rows, base.ORACLE) if crowded else rows


def _beside(panel: base.Panel, *, crowded: bool) -> tuple[Variant, ...]:
    rows = (base.UPSTREAM, base.shortest_prompt_first(panel), base.OURS_OLDEST_FIRST)
    return (*rows, *base.READINGS) if crowded else rows


Windows = Mapping[tuple[str, float, str], Metrics]
"""Model, requests per second that arrive, system."""


def _ranged(ranged: Ranged, found: Windows, pivots: Mapping[str, int]) -> Iterator[PaperClaim]:
    name, compare, least, largest, reasons = ranged
    places = sorted({key[:2] for key in found})

    def against(own: Variant, *others: Variant) -> dict[tuple[str, float, str], float]:
        """Compare a system with others everywhere, but for those that finished nothing."""
        return {
            (*at, other.name): compare(found[*at, own.name], theirs) / (pivots[at[0]] if name == FORWARD else 1)
            for at in places
            for other in others
            if (theirs := found[*at, other.name])["requests"]
        }

    others = base.baselines(base.OPT_13B)  # by their names, which are the same for all models
    published, ours = against(base.ACCELGEN, *others), against(base.OURS, *others)
    tuned, switched = against(base.OURS, base.tuned(base.OPT_13B)), against(base.RELEGATED, *others)
    for which, paper, pick in (("least", least, min), ("largest", largest, max)):
        model, rate, other = pick(published, key=published.__getitem__)
        relegated, own = pick(switched.values()), pick(ours.values())
        yield PaperClaim(
            name=f"{name}, {which}",
            goal=paper,
            kind="up to" if which == "largest" else "value",
            value=published[model, rate, other],
            ours=own,
            tuned=pick(tuned.values(), default=None),
            headline=f"{name}, {which}" in HEADLINES,
            facts=f"against {other} on {model} at {rate:g}/s; {base.RELEGATED.name}: {relegated:.3g}",
            reasons=NO_ORDER if reasons is LOST_FIRST and own < (1 - WITHIN) * paper else reasons,
        )


def _beside_oracle(found: Windows) -> Iterator[PaperClaim]:
    for name, metric, paper in (("output tokens/s", TOKENS, 0.88), ("goodput", GOODPUT, 1 / 1.06)):
        yield PaperClaim(
            name=f"{name}, AccelGen / Oracle, least of the models",
            goal=paper,
            value=min(_between(found, over(metric), base.ACCELGEN, base.ORACLE).values()),
            reasons=ALIKE,
        )


OVER_TUNED = "goodput{}, ours / vLLM 0.32 tuned, least of the models"


def _over_tuned(found: Windows, where: str) -> PaperClaim:
    each = _between(found, over(GOODPUT), base.OURS, base.tuned(base.OPT_13B))
    told = (f"{model} at {rate:g}/s {value:.3g}" for (model, rate), value in each.items())
    return PaperClaim(
        name=OVER_TUNED.format(where), kind="tendency", goal=1.0, value=min(each.values()), facts=", ".join(told)
    )


def _aging(found: Windows, where: str) -> Iterator[PaperClaim]:
    """What our share for the oldest costs, and what it does to the wait."""
    for name, sign, compare, op, alike in (
        ("output tokens/s", "/", over(TOKENS), ">=", 1.0),
        ("P99 wait in seconds", "-", points(WAIT), "<=", 0.0),
    ):
        each = _between(found, compare, base.OURS, base.OURS_UNAGED)
        told = [f"{model} at {rate:g}/s {value:.3g}" for (model, rate), value in each.items()]
        if first := _between(found, compare, base.OURS_OLDEST_FIRST, base.OURS_UNAGED).values():
            told.append(f"oldest first {sign} never aged {statistics.fmean(first):.3g}")
        yield PaperClaim(
            name=f"{name}{where}, ours {sign} never aged, mean of the models",
            kind="tendency",
            op=op,
            goal=alike,
            value=statistics.fmean(each.values()),
            facts=", ".join(told),
            reasons=AGED,
        )


def _between(found: Windows, compare: Compare, one: Variant, other: Variant) -> dict[tuple[str, float], float]:
    """Compare two systems wherever the first ran."""
    places = sorted({key[:2] for key in found if key[2] == one.name})
    return {at: compare(found[*at, one.name], found[*at, other.name]) for at in places}


# --- Figure 12 -------------------------------------------------------------------------------------------------------

NONE_LATE: Mapping[Verdict, Reason] = {"below": Reason("without them too hardly a token is late", "column `in time`")}
FEW_ENDED: Mapping[Verdict, Reason] = {"below": Reason("few requests end in the window", "column `req/s`")}
_STEPS_AND_KV = f"columns `{LABELS[STEP]}` and `{LABELS[KV_USED]}`"
_FEW = Reason("few requests run at once where prompts enter whole", _STEPS_AND_KV)
_FILLED = Reason("in order of arrival long prompts fill steps and KV", _STEPS_AND_KV)
_ONE_MODEL = Reason("only on the 70B model do steps grow much", f"column `{LABELS[STEPS]}`")
UNMATCHED: Mapping[Verdict, Reason] = {
    "below": Reason("with and without it nearly the same requests run", f"column `{LABELS[REQUESTS]}`")
}
Reasons = Mapping[Verdict, Reason]
LOST: tuple[tuple[str, Compare, tuple[float, float, float], tuple[Reasons, Reasons, Reasons]], ...] = (
    ("goodput lost, fraction", lost(GOODPUT), (0.44, 0.52, 0.27), (NONE_LATE,) * 3),
    ("attainment of iterations lost, fraction of all", points(IN_TIME), (0.28, 0.42, 0.24), (NONE_LATE,) * 3),
    ("mean JCT grown, fraction", grown(JCT), (0.31, 0.17, 0.19), (FEW_ENDED,) * 3),
    ("iteration time grown, fraction", fewer(STEPS), (0.39, 0.56, 0.29),
     ({"below": _FEW}, {"below": _ONE_MODEL, "above": _FILLED}, UNMATCHED)),
    ("compute use lost, fraction", lost(STEP), (0.28, 0.08, 0.15), ({"above": _FEW}, {"below": _FILLED}, UNMATCHED)),
    ("KV use lost, fraction", lost(KV_USED), (0.07, 0.01, 0.11), ({"above": _FEW}, {"below": _FILLED}, UNMATCHED)),
)  # fmt: skip
"""What is compared, the paper's figures in the order of `ABLATIONS`, and why each of ours may differ; the first is what
the figure is known by."""


@base.PAPER.figure(
    "accelgen-fig12",
    "Figure 12",
    "AccelGen without dynamic chunking, ordering or matching",
    (
        *base.DIFFERENCES,
        "The paper contradicts itself: without Chunk throughput falls by 97 % and goodput by 44 %. What comes in time "
        "is a part of what comes, so that of the whole system's tokens at most 5 % came in time; its section 6.2 has "
        "attainments far above that. Throughput is in the table and not judged.",
        "An iteration takes the window over its steps: the device is never idle. Compute use is tokens of a step over "
        "S_pf, which cancels; the use of compute and of KV is lost as a fraction of AccelGen's, not in points.",
        "The paper's figures are one number per ablation; ours are means over the models, with each model's beside it.",
    ),
    repeats=5,
)
def fig12(runner: Runner) -> Findings:
    """What is lost without dynamic chunking (/Chunk), the order by remaining time (/Order), or the match (/Batch)?

    Method: the window of Figure 11, for AccelGen and its ablations; the mean over the models of what each loses.
    """
    load, panels, told = setting(runner)
    names, rows = [panel.name for panel in panels], (base.ACCELGEN, *base.ABLATIONS)
    found = runner.metrics(
        {
            (panel.name, c.name): base.spec(c, panel, load, runner.seed)
            for panel in panels
            for c in (*rows, *(() if runner.judged_only else (base.OURS, base.UPSTREAM, base.tuned(panel))))
        }
    )
    claims = []
    for name, compare, figures, reasons in LOST:
        for ablation, paper, why in zip(base.ABLATIONS, figures, reasons, strict=True):
            each = {p: compare(found[p, base.ACCELGEN.name], found[p, ablation.name]) for p in names}
            claims.append(
                PaperClaim(
                    name=f"{ablation.name}: {name}",
                    goal=paper,
                    value=statistics.fmean(each.values()),
                    headline=name == LOST[0][0],
                    facts=", ".join(f"{panel} {value:.2f}" for panel, value in each.items()),
                    reasons=why,
                )
            )
    return Findings(
        tables=[table(found, ("model", "system"))],
        **values(found, "{}.".format),
        claims=claims,
        config=told,
        plots=[
            bar_plot(
                "",
                names,
                {c.name: [found[panel, c.name][GOODPUT] for panel in names] for c in rows},
                ylabel="tokens/s in time",
                title="AccelGen without one of its methods",
            )
        ],
        workload=[base.workload_spec(panels[0], load, runner.seed)],
    )
