"""ALISE, Figure 5: how well its equations for the time of a request fit the cost model; Figure 2, what they bring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from vllm_ext.experiments import steps
from vllm_ext.experiments.experiment import Findings, flat, line_plot
from vllm_ext.experiments.papers import alise as base
from vllm_ext.experiments.runner import Runner
from vllm_ext.experiments.steps import findings, roofline
from vllm_ext.report.claim import PaperClaim
from vllm_ext.report.table import Table
from vllm_ext.simulation.cost.profiled import features_of, runtime_model
from vllm_ext.simulation.cost.step_shape import CostModel, StepShape
from vllm_ext.simulation.spec import Limits

NOT_SIMULATED = {
    "Figures 1, 3 and 4": "drawings",
    "Figure 7": "the data sets' lengths, which the workloads are drawn from",
    "Table 2, all but throughput": "of a predictor, not simulated: docs/prediction.md has ours on public texts",
}
"""Figures and tables without an experiment, and why."""
MODEL, DEVICE, DATASET = base.JUDGED, "v100", "sharegpt"

# --- Figure 2 ---------------------------------------------------------------------------------------------------------


@base.PAPER.figure(
    "alise-fig2",
    "Figure 2",
    "Latency over the rate: first come, first served, and ALISE",
    (
        *base.DIFFERENCES,
        "The text names no latency at which throughput is compared: here it is 200 ms/token, as in Figure 6, and the "
        "runs are that figure's.",
    ),
    repeats=2,
)
def fig2(runner: Runner) -> Findings:
    """How much more throughput has ALISE than first come, first served, at the same latency?

    Method: OPT-13B on one V100 with ShareGPT's lengths; the search of Figure 6.
    """
    error, panel = base.PAPER_ERROR[DATASET], (MODEL, DATASET)
    eight, tuned = base.ours_in_8_bits(error), base.in_8_bits(base.VLLM_TUNED)
    fcfs, paper = base.VLLM_2023, base.alise(error)
    shown = [fcfs, paper]
    if not runner.quick:
        shown += [tuned, eight] if runner.judged_only else [base.VLLM, tuned, base.never_aged(error), eight]
    duration_s = base.QUICK_S[DATASET] if runner.quick else base.PANELS[panel][0]
    start = {c.name: base.PANELS[panel][1] * c.start for c in shown}
    found = runner.sustained(
        {c.name: partial(base.spec, c, *panel, duration_s=duration_s, seed=runner.seed) for c in shown},
        {base.NORMALISED: base.LIMIT_MS},
        start_per_s=start.__getitem__,
        tolerance=0.25 if runner.quick else 0.08,
    )
    rate = {name: one.crossing_per_s for name, one in found.items()}
    curves = {name: [(at, cells["e2e_mean_ms"]) for at, cells in one.trials] for name, one in found.items()}
    ours = rate.get(eight.name)
    claim = PaperClaim(
        name="rate at 200 ms/token, ALISE / first come, first served", kind="up to", goal=2.0, headline=True,
        value=rate[paper.name] / rate[fcfs.name], ours=ours and ours / rate[fcfs.name],
        tuned=ours and ours / rate[tuned.name], reasons=base.FIG6_REASONS[fcfs],
    )  # fmt: skip
    rows = [(name, at, at / rate[fcfs.name]) for name, at in rate.items()]
    return Findings(
        tables=[Table(("system", "req/s at 200 ms/token", "x FCFS"), rows)],
        claims=[claim],
        **flat({(name,): {"rate_at_200ms_per_s": at} for name, at in rate.items()}, "".format, own={paper.name: ""}),
        config={"duration_s": duration_s},
        plots=[line_plot("", curves, xlabel="request rate (requests/s)", ylabel="mean end-to-end latency (ms)")],
        workload=base.lengths(DATASET),
    )


# --- Figure 5 ---------------------------------------------------------------------------------------------------------

LENGTHS = (64, 128, 256, 512, 1024)
"""Prompts, and outputs."""
LIMITS = Limits(max_model_len=2048, max_num_seqs=256, max_num_batched_tokens=2048)


@base.PAPER.figure(
    "alise-fig5",
    "Figure 5 and equations 3 to 5",
    "Time of prefill and of decode over their lengths, and the equations' errors",
    (
        *steps.DIFFERENCES,
        "The paper fits its equations to measured runs; here they are fitted, by least squares, to the times that the "
        "cost model gives one request alone.",
    ),
)
def fig5(_: Runner) -> Findings:
    """Is a prefill linear in the prompt s, and a decode n times a line in s?

    Method: OPT-13B on one V100. T_pre = s T0 and T_dec = n (alpha s + beta) are fitted; errors are relative, over the
    same lengths. Ours is the runtime model that `vllm-ext profile` would make: it prices steps, each with a constant.
    """
    cost = roofline(MODEL, DEVICE)
    prefills = {s: [StepShape.of_chunk(s)] for s in (*LENGTHS, 2048)}
    decodes = {(s, n): [StepShape.of_decodes(1, s + k) for k in range(1, n + 1)] for s in LENGTHS for n in LENGTHS}
    equations = {
        "T_pre = s T0": errors(cost, prefills, [[s] for s in prefills]),
        "T_dec = n (alpha s + beta)": errors(cost, decodes, [[n * s, n] for s, n in decodes]),
    }
    claims = [
        PaperClaim(name=f"{equation}: mean error, fraction", kind="tendency", op="<=", goal=0.1, headline=True,
                   value=fmean(cells["error"] for cells in rows.values()),
                   ours=fmean(cells["error, ours"] for cells in rows.values()),
                   facts=f"largest {max(cells['error'] for cells in rows.values()):.2g}")
        for equation, rows in equations.items()
    ]  # fmt: skip
    longest = decodes[LENGTHS[0], LENGTHS[-1]]
    claims.append(
        PaperClaim(name=f"iteration {LENGTHS[-1]} of a decode / the first: no noticeable change", kind="tendency",
                   op="<=", goal=1.1, value=cost.device_s(longest[-1]) / cost.device_s(longest[0]))
    )  # fmt: skip
    return findings("request", {name: cells for rows in equations.values() for name, cells in rows.items()}, claims)


def errors(
    cost: CostModel, requests: Mapping[Any, Sequence[StepShape]], features: Sequence[Sequence[float]]
) -> dict[str, dict[str, float]]:
    """Return what requests take, what least squares make of it, and by how much that and our model are off."""
    model, matrix = runtime_model(cost, LIMITS), np.array(features, dtype=float)
    took = np.array([sum(map(cost.device_s, shapes)) for shapes in requests.values()])
    ours = [sum(model.step_time_s(features_of(shape)) for shape in shapes) for shapes in requests.values()]
    line = matrix @ np.linalg.lstsq(matrix, took, rcond=None)[0]
    return {
        f"s, n = {key}" if isinstance(key, tuple) else f"s = {key}": {
            "ms": 1000 * time, "by the equation, ms": 1000 * told, "error": abs(told / time - 1),
            "error, ours": abs(own / time - 1),
        }
        for key, time, told, own in zip(requests, took.tolist(), line.tolist(), ours, strict=True)
    }  # fmt: skip
