"""AccelGen, Figures 3 to 5: what batches of its baselines hold and how long they take; what figures have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from vllm_ext.experiments.experiment import Findings, Variant, bar_plot, line_plot
from vllm_ext.experiments.grid import Metrics
from vllm_ext.experiments.papers import accelgen as base
from vllm_ext.experiments.papers import accelgen_figures as windows
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.claim import PaperClaim, Reason, Verdict
from vllm_ext.report.table import Table
from vllm_ext.simulation.measure.run_data import RunData
from vllm_ext.simulation.spec import RecordSpec, SimulationSpec
from vllm_ext.simulation.workloads.spec import SloTarget, TierSpec

NOT_SIMULATED = {
    "Figures 1, 2, 9 and 10": "drawings of the model, of chunks, of the system and of a deadline",
    "Figure 8": "not a result: lengths are drawn by it",
    "Figures 11f and 12f": "the scheduler's own time is the clock's, which no simulation keeps",
}
MODELS = (base.OPT_13B, base.OPT_175B)
"""Those of section 3."""
MEAN_OF_MODELS = "The text gives means over OPT-13B and OPT-175B, and so are ours."
SCALED = (
    "Objectives are those of section 3.2: a TBT of 0.1875 s times 0.25, 0.5, 1 or 2, by chance; TTFT as everywhere."
)


SCALES = (0.25, 0.5, 1.0, 2.0)


def shown(found: Mapping[tuple[Any, ...], Metrics], dims: Sequence[str], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return ``tables`` and ``metrics``, fields of `Findings`, of cells by their keys; metric -> its column."""
    rows = [(*key, *(one[name] for name in columns)) for key, one in found.items()]
    return {
        "tables": [Table((*dims, *columns.values()), rows)],
        "metrics": {f"{', '.join(map(str, key))}: {name}": one[name] for key, one in found.items() for name in columns},
    }


def labelled(*names: str) -> dict[str, str]:
    """Return metrics of a window with their columns."""
    return {name: windows.LABELS[name] for name in names}


def scaled(described: SimulationSpec, *, announce: bool = True) -> SimulationSpec:
    """Return a run with the TBT objectives of section 3.2; ``announce``: the scheduler is told of them."""
    workload = described.workload
    tiers = tuple(
        TierSpec(name=f"x{scale:g}", ttft=workload.tiers[0].ttft, tbt=SloTarget(base_s=scale * base.READING_TBT_S))
        for scale in SCALES
    )
    mix = tuple(part.model_copy(update={"tier": None}) for part in workload.mix)
    changed = workload.model_copy(update={"tiers": tiers, "mix": mix, "announce_slo": announce})
    return described.model_copy(update={"workload": changed})


# --- Figures 3 and 4 --------------------------------------------------------------------------------------------------

USE = {"Orca": (0.33, 0.88), "vLLM-2023": (0.61, 0.79), "FastGen": (0.62, 0.80), "Sarathi-Serve": (0.64, 0.83)}
"""Baseline -> the paper's mean use of compute and of KV."""
RATES = (0.5, 2.0, base.RATE_PER_S)
MOST_STEPS = 1_000_000
WITHIN, COMPUTE, KV = "steps_within_reading_time_fraction", "compute_used_fraction", "kv_allocated_fraction"
STEP_COLUMNS = {
    WITHIN: "within 0.1875 s", "step_p50_ms": "median step ms", "step_p90_ms": "P90 step ms",
    "tokens_per_step": "tokens/step", COMPUTE: "compute in use", KV: "KV allocated",
}  # fmt: skip
SLOWER = (4.0, 8.0)
"""Rows whose steps take so many times longer, to find out how long the paper's were."""
QUICKER: Mapping[Verdict, Reason] = {
    "above": Reason("only steps eight times as long give the paper's fraction",
                    f"row `Sarathi-Serve, {base.LONGER.format(max(SLOWER))}`")
}  # fmt: skip
UNBOUND = Variant(name="Orca, any number at a time", system="orca")
EIGHT: Mapping[Verdict, Reason] = {
    "below": Reason("eight requests at a time leave OPT-175B's KV unused", f"row `{UNBOUND.name}`")
}
FULL: Mapping[Verdict, Reason] = {
    "below": Reason("the KV is full long before a step is", "columns `tokens/step` and `KV allocated`")
}


@base.PAPER.figure(
    "accelgen-fig3",
    "Figure 3 and Figure 4",
    "Time, compute and KV of the baselines' batches: whether the load can be what the paper ran",
    (
        *base.DIFFERENCES,
        MEAN_OF_MODELS,
        "Compute in use is the tokens of a step over S_pf of the simulated hardware (config.pivot_tokens; the paper: "
        "768 and 1280), at most 1: a whole prompt of Orca's and vLLM's exceeds it. KV is averaged over time, the "
        "paper's over steps; Orca's has what it reserves.",
        "The paper's rate is 8 requests/s, which is judged. Lower rates stand beside it, and so do the baselines on "
        "devices with a quarter and an eighth of every rate. Decode steps of one model take nearly the same time, so "
        "the fraction falls from a half to a tenth where those of OPT-13B reach 0.1875 s: at seven to nine times.",
        "Attainments (d) have no numbers in the text; accelgen-fig5 shows those of Sarathi-Serve.",
    ),
    repeats=5,
)
def fig3(runner: Runner) -> Findings:
    """How long do the baselines' steps take, and how much of compute and KV do they use, in the paper's own setting?

    Method: the window of Figure 11 with every step kept. Absolute figures, not ratios: where they are not the paper's,
    the paper ran another load or slower steps, and its ratios belong to these.
    """
    load, _, config = windows.setting(runner)
    rates = (base.RATE_PER_S,) if runner.quick else RATES
    found = {}
    for panel in MODELS:
        rows = [c for c in base.baselines(panel) if c.name in USE]
        for rate in rates:
            slow = () if runner.judged_only or rate != base.RATE_PER_S else SLOWER
            for c in (*rows, *(base.slower(row, panel, factor) for factor in slow for row in rows), UNBOUND, base.OURS):
                described = base.spec(c, panel, replace(load, rate_per_s=rate), runner.seed)
                kept = described.model_copy(update={"record": RecordSpec(events=MOST_STEPS)})
                found[panel.name, rate, c.name] = _of_steps(runner.run(kept), panel, reserves=c.system == "orca")
    mean = {
        name: {metric: fmean(found[panel.name, base.RATE_PER_S, name][metric] for panel in MODELS)
               for metric in STEP_COLUMNS}
        for name in (*USE, base.OURS.name)
    }  # fmt: skip
    ours, told = mean[base.OURS.name], {name: mean[name][WITHIN] for name in USE}
    if not runner.judged_only:
        told |= {slow: fmean(one[WITHIN] for (*_, name), one in found.items() if name.endswith(slow))
                 for slow in map(base.LONGER.format, SLOWER)}  # fmt: skip
    return Findings(
        **shown(found, ("model", "requests/s", "system"), STEP_COLUMNS),
        claims=[
            PaperClaim(
                name="batches within 0.1875 s, fraction, mean of the systems",
                goal=0.16,
                most=0.34,
                value=fmean(mean[name][WITHIN] for name in USE),
                ours=ours[WITHIN],
                headline=True,
                facts=", ".join(f"{name} {within:.2f}" for name, within in told.items()),
                reasons=QUICKER,
            ),
            *(
                PaperClaim(name=f"{name}: {STEP_COLUMNS[metric]}, fraction", goal=goal, value=mean[name][metric],
                           ours=ours[metric], headline=name == "Sarathi-Serve",
                           reasons=FULL if metric == COMPUTE else EIGHT if name == "Orca" else {})
                for name, goals in USE.items()
                for metric, goal in zip((COMPUTE, KV), goals, strict=True)
            ),
        ],
        config={
            **config,
            "pivot_tokens": {panel.name: panel.pivot_tokens for panel in MODELS},
            "pivot_step_ms": {panel.name: 1000 * base.prompt_s(panel.cost, panel.pivot_tokens) for panel in MODELS},
            "kv_tokens": {panel.name: panel.kv_tokens for panel in MODELS},
        },
        plots=[
            bar_plot(
                f"-{metric.split('_')[0]}", list(USE),
                {"paper": [goals[at] for goals in USE.values()], "here": [mean[name][metric] for name in USE]},
                ylabel=STEP_COLUMNS[metric], title="mean of OPT-13B and OPT-175B, 8 requests/s",
            )
            for at, metric in enumerate((COMPUTE, KV))
        ],
        workload=[base.workload_spec(MODELS[0], load, runner.seed)],
    )  # fmt: skip


def _of_steps(run: RunData, panel: base.Panel, *, reserves: bool) -> dict[str, float]:
    assert run.events is not None
    steps = run.events.steps
    takes_s = np.array([step.end_s - step.start_s for step in steps])
    tokens = np.array([step.prefill_tokens + step.decode_tokens for step in steps])
    return {
        WITHIN: float((takes_s <= base.READING_TBT_S).mean()),
        "step_p50_ms": 1000 * float(np.quantile(takes_s, 0.5)),
        "step_p90_ms": 1000 * float(np.quantile(takes_s, 0.9)),
        "tokens_per_step": float(tokens.mean()),
        COMPUTE: float(np.minimum(tokens / panel.pivot_tokens, 1.0).mean()),
        KV: _reserved(run, panel) if reserves else run.counters["mean_kv_used_fraction"],
    }


def _reserved(run: RunData, panel: base.Panel) -> float:
    """Return the share of the KV that is kept for running requests up to the client's bound."""
    total = 0.0
    for table in (run.requests, run.unserved):
        begun, left = table.column("first_scheduled_s"), table.column("finish_s")
        held = np.minimum(table.column("prompt_tokens") + base.MAX_OUTPUT_TOKENS, panel.context_tokens)
        total += float(np.nansum(held * (np.where(np.isnan(left), run.duration_s, left) - begun)))
    return total / (run.duration_s * panel.kv_tokens)


# --- Figure 5 ---------------------------------------------------------------------------------------------------------

SLOS_S = (0.2, 0.4, 0.6, 0.8, 1.0)
MOST_TOKENS = 16_384
"""Of a step: more than the loosest objective allows."""


@base.PAPER.figure(
    "accelgen-fig5",
    "Figure 5",
    "Sarathi-Serve with one objective for all: attainment and compute against that objective",
    (
        *base.DIFFERENCES,
        SCALED,
        "Sarathi-Serve's budget follows from the objective for all as in its paper: the step beside 32 decodes of 4096 "
        "tokens that keeps it. The figure prints no numbers.",
    ),
    repeats=5,
)
def fig5(runner: Runner) -> Findings:
    """Does an objective for all that is strict cost throughput, and one that is loose attainment?

    Method: the window of Figure 11 on both models, Sarathi-Serve as published with 0.2 to 1 s for everybody.
    """
    load, _, told = windows.setting(runner)
    rows = {
        slo_s: Variant(
            name=f"{slo_s:g} s",
            system="sarathi-published",
            options={"budget": {"default_tbt_ms": 1000 * slo_s}},
            engine={"max_num_batched_tokens": MOST_TOKENS},
        )
        for slo_s in SLOS_S
    }
    found = runner.metrics(
        {(panel.name, slo_s): scaled(base.spec(c, panel, load, runner.seed), announce=False)
         for panel in MODELS for slo_s, c in rows.items()}
    )  # fmt: skip

    def over(metric: str, one_s: float, other_s: float) -> dict[str, float]:
        return {p.name: found[p.name, one_s][metric] / max(found[p.name, other_s][metric], 1e-9) for p in MODELS}

    return Findings(
        **shown(found, ("model", "objective s"),
                 labelled(windows.IN_TIME, windows.STEP, windows.TOKENS, windows.GOODPUT, windows.KV_USED)),
        claims=[
            PaperClaim(name=f"{what}, least of the models", kind="tendency", op=">", goal=1.0,
                       value=min(ratios.values()), headline=True,
                       facts=", ".join(f"{model} {ratio:.3f}" for model, ratio in ratios.items()))
            for what, ratios in {
                "attainment of iterations, 0.2 s / 1 s": over(windows.IN_TIME, SLOS_S[0], SLOS_S[-1]),
                "tokens of a step, 1 s / 0.2 s": over(windows.STEP, SLOS_S[-1], SLOS_S[0]),
            }.items()
        ],
        config=told,
        plots=[
            line_plot(f"-{suffix}", {panel.name: [(slo_s, found[panel.name, slo_s][metric]) for slo_s in SLOS_S]
                                     for panel in MODELS},
                      xlabel="objective for all (s)", ylabel=windows.LABELS[metric], title="Sarathi-Serve")
            for suffix, metric in {"attainment": windows.IN_TIME, "compute": windows.STEP}.items()
        ],
        workload=[base.workload_spec(MODELS[0], load, runner.seed)],
    )  # fmt: skip
