"""AccelGen, Figures 6, 7 and 14: one long prompt at a time, the order by remaining time, and each data set alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np

from vllm_ext.experiments.data import lengths_file
from vllm_ext.experiments.experiment import Findings, Variant, bar_plot
from vllm_ext.experiments.grid import Metrics
from vllm_ext.experiments.papers import accelgen as base
from vllm_ext.experiments.papers import accelgen_batches as batches
from vllm_ext.experiments.papers import accelgen_figures as windows
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.claim import PaperClaim, Reason, Verdict
from vllm_ext.simulation.measure.run_data import RunData
from vllm_ext.simulation.spec import RecordSpec, SimulationSpec
from vllm_ext.simulation.workloads.synthetic import PRESETS

PLAIN = {"match": False, "preempt": False, "exclusive": False}
"""Requests join as they stand in the queue, and nobody leaves for another."""


def _by_arrival(name: str, **admission: bool) -> Variant:
    """AccelGen's budget of equation 6 in order of arrival."""
    ablation = base.ABLATIONS[1]
    changed = {**ablation.options["admission"], **PLAIN, **admission}
    return replace(ablation, name=name, options={**ablation.options, "admission": changed})


FIFO, ERA = _by_arrival("FIFO"), _by_arrival("FIFO with ERA", exclusive=True, exclusive_to_end=True)
COMPUTED_ERA = _by_arrival("FIFO with ERA until a prompt is computed", exclusive=True)
ORDERED = Variant(name="by remaining time", system=base.PAPER.row, options={"admission": PLAIN})
NO_ERA = Variant(name="AccelGen without ERA", system=base.PAPER.row, options={"admission": {"exclusive": False}})

# --- Figure 6 ---------------------------------------------------------------------------------------------------------

LONG, SHORT, SHORTS = (10_214, 10_252), (128, 384), 20
"""Tokens of the long prompts; of the short ones from the least to the most, and how many there are."""
JCT, LONG_JCT = "jct_mean_s", "long_jct_mean_s"
NOT_TWO: Mapping[Verdict, Reason] = {
    "tendency": Reason("two long prompts are never computed at a time anyway", f"rows `{FIFO.name}` and `{ERA.name}`")
}
ERA_COLUMNS = {LONG_JCT: "JCT of the long s", JCT: "JCT of all s", "preemptions": "preemptions"}


@base.PAPER.figure(
    "accelgen-fig6",
    "Figure 6",
    "Exclusive request allocation: two long prompts and twenty short ones",
    (
        *base.DIFFERENCES,
        "The text gives prompt lengths only: all arrive at once, in an order by chance, and outputs are ShareGPT's. "
        "The figure prints no numbers.",
        "ERA is on and off with all else as in Sarathi-Serve: arrival order, steps of S_pf. A running prompt takes all "
        "that the decodes leave of a step, so that two are not computed at a time anyway. In both rows who would be "
        "late may pass a prompt that does not fit; Sarathi-Serve's row is strict.",
        "ERA ends when the long prompt's request is completed, as section 4.2 says; a row has it end when the prompt "
        "is computed. Requests of the rows of AccelGen have the objectives of section 3.2.",
    ),
    repeats=5,
)
def fig6(runner: Runner) -> Findings:
    """Do requests end earlier if a second long prompt starts only when the first one is through?

    Method: 22 requests on each of the models of section 3; mean time to the end, of the long ones and of all.
    """
    file = _two_long(runner.seed)
    found = {
        (panel.name, c.name): _of_jobs(runner.run(_at_once(c, panel, file)))
        for panel in batches.MODELS
        for c in (*_in_steps_of_pivot(panel), NO_ERA, base.ACCELGEN, base.OURS)
    }

    def gained(metric: str) -> dict[str, float]:
        return {p.name: found[p.name, FIFO.name][metric] / found[p.name, ERA.name][metric] for p in batches.MODELS}

    return Findings(
        **batches.shown(found, ("model", "system"), ERA_COLUMNS),
        claims=[
            PaperClaim(name=f"mean JCT of {whose}, without ERA / with it, least of the models", kind="tendency",
                       op=">", goal=1.0, value=min((each := gained(metric)).values()), headline=True,
                       facts=", ".join(f"{model} {ratio:.3f}" for model, ratio in each.items()), reasons=NOT_TWO)
            for metric, whose in ((LONG_JCT, "the long prompts"), (JCT, "all"))
        ],
        config={"long_prompt_tokens": LONG, "short_prompt_tokens": SHORT, "short_prompts": SHORTS},
        workload=[_at_once(ERA, base.OPT_13B, file).workload],
    )  # fmt: skip


def _in_steps_of_pivot(panel: base.Panel) -> tuple[Variant, ...]:
    sarathi = next(c for c in base.baselines(panel) if c.name == "Sarathi-Serve")
    engine = {"max_num_batched_tokens": panel.pivot_tokens}
    return sarathi, *(replace(c, engine=engine) for c in (FIFO, ERA, COMPUTED_ERA))


def _two_long(seed: int) -> Path:
    rng = np.random.default_rng(seed)
    prompts = rng.permutation([*LONG, *rng.integers(SHORT[0], SHORT[1] + 1, SHORTS)])
    _, outputs = PRESETS["sharegpt-vllm"].draw(rng, len(prompts))
    return lengths_file("accelgen-fig6", zip(prompts.tolist(), outputs, strict=True))


def _at_once(variant: Variant, panel: base.Panel, file: Path) -> SimulationSpec:
    """Return a run of the jobs; AccelGen is told of objectives."""
    announce = variant in (NO_ERA, base.ACCELGEN, base.OURS)
    described = batches.scaled(base.spec(variant, panel, windows.QUICK, 0), announce=announce)
    jobs = {"source": str(file), "mix": (), "arrivals": "at-once", "rate_per_s": None, "duration_s": None}
    workload = described.workload.model_copy(update=jobs)
    return described.model_copy(update={"workload": workload, "record": RecordSpec(), "max_time_s": None})


def _of_jobs(run: RunData) -> dict[str, float]:
    taken, long = run.requests.column("e2e_s"), run.requests.column("prompt_tokens") >= min(LONG)
    counted = run.counters["preemptions"]
    return {LONG_JCT: float(taken[long].mean()), JCT: float(taken.mean()), "preemptions": counted}


# --- Figure 7 ---------------------------------------------------------------------------------------------------------

GAINED = {windows.STEP: 0.37, windows.KV_USED: 0.34, windows.IN_TIME: 0.16}
"""Metric -> by what fraction the paper's is higher in the order by remaining time than in order of arrival."""
STRICTEST = "strictest_running_fraction"
MIXED: Mapping[Verdict, Reason] = {
    "below": Reason("that order mixes objectives in a batch more, not less", "column `time with a strictest objective`")
}


@base.PAPER.figure(
    "accelgen-fig7",
    "Figure 7",
    "Order by the time that is left to objectives against order of arrival",
    (
        *base.DIFFERENCES,
        batches.SCALED,
        "Both orders have the same budget, which keeps the strictest objective in the batch (equation 6); nobody is "
        "preempted for another, and demands are not matched. The paper measures Sarathi-Serve with such a budget.",
        "The text does not say of which model its figures are; ours are means over both.",
    ),
    repeats=5,
)
def fig7(runner: Runner) -> Findings:
    """Does it fill batches better to have requests with like objectives together?

    Method: the window of Figure 11 with the objectives of section 3.2; only the order of the queue differs. `AccelGen`
    has the match of demands and preemption besides.
    """
    load, _, told = windows.setting(runner)
    specs = {
        (panel.name, c.name): batches.scaled(base.spec(c, panel, load, runner.seed))
        for panel in batches.MODELS for c in (FIFO, ORDERED, base.ACCELGEN, base.OURS)
    }  # fmt: skip
    found = runner.metrics(specs)

    def gained(metric: str, own: Variant) -> dict[str, float]:
        compare = windows.grown(metric)
        return {p.name: compare(found[p.name, FIFO.name], found[p.name, own.name]) for p in batches.MODELS}

    columns = batches.labelled(*GAINED, windows.TOKENS, windows.GOODPUT, windows.JCT)
    return Findings(
        **batches.shown(found, ("model", "system"), columns | {STRICTEST: "time with a strictest objective"}),
        claims=[
            PaperClaim(name=f"{windows.LABELS[metric]}, by remaining time over FIFO, fraction gained", goal=goal,
                       value=fmean((each := gained(metric, ORDERED)).values()),
                       ours=fmean(gained(metric, base.OURS).values()), headline=True,
                       facts=", ".join(f"{model} {value:+.2f}" for model, value in each.items()), reasons=MIXED)
            for metric, goal in GAINED.items()
        ],
        config=told,
        workload=[base.workload_spec(base.OPT_13B, load, runner.seed)],
    )  # fmt: skip


# --- Figure 14 --------------------------------------------------------------------------------------------------------

IMPROVED = {base.BOOKS: (2.57, 33.0), "alpaca": (1.41, 18.0), "sharegpt": (1.45, 19.0)}
"""Data set -> the paper's least and largest ratio of goodput over its baselines."""
SERVED: Mapping[Verdict, Reason] = {
    "below": Reason("8 requests/s are served in time by every system", "column `in time`")
}
SMALL_STEPS: Mapping[Verdict, Reason] = {
    "below": Reason("its steps stay small on the 70B model", "column `tokens/step`")
}
FEWER = {base.BOOKS: SMALL_STEPS, "alpaca": SERVED, "sharegpt": windows.ALL_IN_TIME}
"""Data set -> why the gain is less than the paper's."""


@base.PAPER.figure(
    "accelgen-fig14",
    "Figure 14",
    "Goodput with one data set alone: BookCorpus, Alpaca, ShareGPT",
    (
        *base.DIFFERENCES,
        "The text gives no rate of the single data sets: it is 8 requests/s here too, which is mild for Alpaca. Nor "
        "does it say of which models the ranges are: ours are over OPT-13B (memory is short) and Llama-3-70B (compute "
        "is), as those of accelgen-fig13.",
    ),
    repeats=5,
)
def fig14(runner: Runner) -> Findings:
    """Does AccelGen gain most where prompts are long?

    Method: the window of Figure 11, with requests of one data set only; AccelGen over each of the paper's baselines.
    """
    (load, _, told), panels = windows.setting(runner), (base.OPT_13B, base.LLAMA_70B)
    beside = () if runner.judged_only else (base.UPSTREAM,)
    found = runner.metrics(
        {
            (data, panel.name, c.name): _alone(base.spec(c, panel, load, runner.seed), data)
            for data in IMPROVED
            for panel in panels
            for c in (*base.baselines(panel), base.tuned(panel), base.ACCELGEN, base.OURS, *beside)
        }
    )
    models = [panel.name for panel in panels]
    columns = (windows.GOODPUT, windows.IN_TIME, windows.TOKENS, windows.REQUESTS, windows.STEP, windows.KV_USED)
    return Findings(
        **batches.shown(found, ("data set", "model", "system"), batches.labelled(*columns)),
        claims=[claim for data in IMPROVED for claim in _improved(data, found, models)],
        config=told,
        plots=[
            bar_plot(f"-{data}", models,
                     {c.name: [found[data, model, c.name][windows.GOODPUT] for model in models]
                      for c in (*base.baselines(panels[0]), base.ACCELGEN, base.OURS)},
                     ylabel="tokens/s in time", title=f"{data}, 8 requests/s")
            for data in IMPROVED
        ],
        workload=[_alone(base.spec(base.ACCELGEN, panels[0], load, runner.seed), data).workload for data in IMPROVED],
    )  # fmt: skip


def _alone(described: SimulationSpec, data: str) -> SimulationSpec:
    workload = described.workload
    mix = tuple(part for part in workload.mix if part.tier == data)
    return described.model_copy(update={"workload": workload.model_copy(update={"mix": mix})})


def _improved(data: str, found: Mapping[tuple[str, str, str], Metrics], models: Sequence[str]) -> Iterator[PaperClaim]:
    def ratios(own: Variant, *others: Variant) -> dict[tuple[str, str], float]:
        """Over those that delivered anything in time."""
        return {
            (model, other.name): windows.over(windows.GOODPUT)(found[data, model, own.name], theirs)
            for model in models
            for other in others
            if (theirs := found[data, model, other.name])[windows.GOODPUT]
        }

    others = base.baselines(base.OPT_13B)  # by their names, which are the same for all models
    published, ours = ratios(base.ACCELGEN, *others), ratios(base.OURS, *others)
    tuned = ratios(base.OURS, base.tuned(base.OPT_13B))
    for which, goal, pick in zip(("least", "largest"), IMPROVED[data], (min, max), strict=True):
        model, other = pick(published, key=published.__getitem__)
        yield PaperClaim(
            name=f"{data}: goodput, AccelGen / baseline, {which}", kind="up to" if which == "largest" else "value",
            goal=goal, value=published[model, other], ours=pick(ours.values()), tuned=pick(tuned.values()),
            headline=data == base.BOOKS, facts=f"against {other} on {model}",
            reasons=FEWER[data],
        )  # fmt: skip
