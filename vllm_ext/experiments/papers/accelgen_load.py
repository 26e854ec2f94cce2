"""AccelGen, Figure 13: goodput over the load, by its rate and by its share of long prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from vllm_ext.experiments.experiment import Findings, Variant, line_plot
from vllm_ext.experiments.papers import accelgen as base
from vllm_ext.experiments.papers import accelgen_figures as windows
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.claim import PaperClaim

NOISE = 0.05
"""A fall by less is none: traces are short."""
AXES = {
    "requests/s": ("rate_per_s", "rate", (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0), (0.5, 2.0, 8.0)),
    "share of books": ("books", "books", (0.0, 0.2, 0.35, 0.5, 0.75, 1.0), (0.0, 0.35, 1.0)),
}
"""Axis -> field of `Load`, suffix of its plot, where it is measured, and where in quick runs."""
COLUMNS = (
    windows.GOODPUT,
    windows.IN_TIME,
    "request_attainment_fraction",
    windows.DEADLINE,
    windows.TOKENS,
    windows.REQUESTS,
    windows.JCT,
)


@base.PAPER.figure(
    "accelgen-fig13",
    "Figure 13",
    "Goodput against the share of long prompts and the arrival rate",
    (
        *base.DIFFERENCES,
        "The paper shows one rising curve per axis and states no numbers: what is told is how often goodput does not "
        f"fall (by more than {NOISE:.0%}) from one point to the next. Its axes are not given in the text; ours reach "
        "from mild loads to twice the paper's rate, and from no books to books only.",
    ),
    repeats=5,
)
def fig13(runner: Runner) -> Findings:
    """Does goodput rise with load and with long prompts until the capacity is reached, and stay there?

    Method: the window of Figure 11 on OPT-13B (memory is short) and Llama-3-70B (compute is short), once per rate at 35
    % books and once per share at 8 requests/s; beside our row, and vLLM 0.32. The lowest rates are mild: nobody is lost
    there that a good order could save.
    """
    load = windows.QUICK if runner.quick else windows.FULL
    panels = (base.OPT_13B,) if runner.quick else (base.OPT_13B, base.LLAMA_70B)
    curves = [(panel, axis) for panel in panels for axis in AXES]
    loads = {
        (panel, axis, x): replace(load, **{field: x})
        for panel, axis in curves
        for field, _, full, quick in (AXES[axis],)
        for x in (quick if runner.quick else full)
    }
    found = runner.metrics(
        {
            (panel.name, axis, x, c.name): base.spec(c, panel, at, runner.seed)
            for (panel, axis, x), at in loads.items()
            for c in _compared(panel)
        }
    )
    goodput = {key: one[windows.GOODPUT] for key, one in found.items()}

    def curve(panel: base.Panel, axis: str, variant: Variant) -> dict[float, float]:
        wanted = (panel.name, axis, variant.name)
        return {x: value for (p, a, x, name), value in goodput.items() if (p, a, name) == wanted}

    return Findings(
        tables=[windows.table(found, ("model", "axis", "at", "system"), COLUMNS)],
        **windows.values(found, "{}.{} {:g}.".format, COLUMNS),
        claims=[
            _rises(panel.name, axis, *(curve(panel, axis, c) for c in (base.ACCELGEN, base.OURS)))
            for panel, axis in curves
        ],
        config={
            "arrivals_s": load.arrivals_s,
            "window_s": load.window_s,
        },
        details={
            "utilisation": {
                f"{panel.name}, {axis} {x:g}": base.utilisation(panel, at, runner.seed)
                for (panel, axis, x), at in loads.items()
            },
        },
        plots=[
            line_plot(
                f"-{panel.model}-{AXES[axis][1]}",
                {c.name: curve(panel, axis, c).items() for c in _compared(panel)},
                xlabel=axis,
                ylabel="tokens/s in time",
                title=f"{panel.name}, simulated A100",
                log_x=axis == "requests/s",
            )
            for panel, axis in curves
        ],
        workload=[base.workload_spec(panels[0], load, runner.seed)],
    )


def _compared(panel: base.Panel) -> tuple[Variant, ...]:
    return base.ACCELGEN, base.OURS, base.UPSTREAM, base.tuned(panel)


def _rises(panel: str, axis: str, goodput: Mapping[float, float], ours: Mapping[float, float]) -> PaperClaim:
    """How often goodput rises, or holds, from each point of an axis to the next."""
    field, *_ = AXES[axis]
    curve = ", ".join(f"{x:g}: {value:.0f}" for x, value in goodput.items())
    return PaperClaim(
        name=f"{panel}: share of the steps along {axis} that do not lower goodput",
        kind="tendency",
        goal=1.0,
        value=_holding(goodput),
        ours=_holding(ours),
        headline=field == "rate_per_s",
        facts=f"tokens/s in time at {curve}",
    )


def _holding(goodput: Mapping[float, float]) -> float:
    return fmean(after >= (1 - NOISE) * before for before, after in pairwise(goodput.values()))
