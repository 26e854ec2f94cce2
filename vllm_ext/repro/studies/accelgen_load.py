"""AccelGen, Figure 13: goodput over the load, by its rate and by its share of long prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from vllm_ext.repro.bench import Bench
from vllm_ext.repro.studies.accelgen import (
    ACCELGEN,
    DIFFERENCES,
    LLAMA_70B,
    OPT_13B,
    OURS,
    PAPER,
    UPSTREAM,
    Panel,
    spec,
    tuned,
    utilisation,
    workload_spec,
)
from vllm_ext.repro.studies.accelgen_figures import (
    DEADLINE,
    FULL,
    GOODPUT,
    IN_TIME,
    JCT,
    QUICK,
    REQUESTS,
    TOKENS,
    metrics,
    table,
    told,
)
from vllm_ext.repro.studies.accelgen_window import observe_all
from vllm_ext.repro.study import Claim, Contender, Findings, line_plot

NOISE = 0.05
"""A fall by less is none: traces are short."""
AXES = {
    "requests/s": ("rate_per_s", "rate", (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0), (0.5, 2.0, 8.0)),
    "share of books": ("books", "books", (0.0, 0.2, 0.35, 0.5, 0.75, 1.0), (0.0, 0.35, 1.0)),
}
"""Axis -> field of `Load`, suffix of its plot, where it is measured, and where in quick runs."""
WHY = {
    "rate_per_s": (
        "not traced; a supposition: beyond capacity preemptions cost more than the choice among late requests gains"
    ),
    "books": (
        "a supposition: a book takes the compute or KV of tens of short requests for one answer of at most 2048, so "
        "that tokens generated per second fall with every book in an overload; the paper's rise needs capacity to "
        "spare, or prompt tokens to count"
    ),
}
COLUMNS = (
    GOODPUT,
    IN_TIME,
    "request_attainment_fraction",
    DEADLINE,
    TOKENS,
    "processed_tokens_per_s",
    REQUESTS,
    JCT,
)


@PAPER.study(
    "accelgen-fig13",
    "Figure 13",
    "Goodput against the share of long prompts and the arrival rate",
    (
        *DIFFERENCES,
        "The paper shows one rising curve per axis and states no numbers: the claim is that goodput does not fall (by "
        f"more than {NOISE:.0%}) from one point to the next. Its axes are not given in the text; ours reach from mild "
        "loads to twice the paper's rate, and from no books to books only.",
    ),
)
def fig13(bench: Bench) -> Findings:
    """Does goodput rise with load and with long prompts until the capacity is reached, and stay there?

    Method: the window of Figure 11 on OPT-13B (memory is short) and Llama-3-70B (compute is short), once per rate at 35
    % books and once per share at 8 requests/s; beside our row, and vLLM 0.32. The lowest rates are mild: nobody is lost
    there that a good order could save.
    """
    load = QUICK if bench.quick else FULL
    panels = (OPT_13B,) if bench.quick else (OPT_13B, LLAMA_70B)
    curves = [(panel, axis) for panel in panels for axis in AXES]
    loads = {
        (panel, axis, x): replace(load, **{field: x})
        for panel, axis in curves
        for field, _, full, quick in (AXES[axis],)
        for x in (quick if bench.quick else full)
    }
    found = observe_all(
        {
            (panel.name, axis, x, c.name): spec(c, panel, at, bench.seed)
            for (panel, axis, x), at in loads.items()
            for c in (ACCELGEN, OURS, UPSTREAM, tuned(panel))
        }
    )

    goodput = {key: one[GOODPUT] for key, one in found.items()}

    def curve(panel: Panel, axis: str, contender: Contender) -> dict[float, float]:
        wanted = (panel.name, axis, contender.name)
        return {x: value for (p, a, x, name), value in goodput.items() if (p, a, name) == wanted}

    return Findings(
        **table(found, ("model", "axis", "at", "system"), COLUMNS),
        claims=[_rises(panel.name, axis, curve(panel, axis, ACCELGEN)) for panel, axis in curves],
        **metrics(found, lambda panel, axis, x: f"{panel}.{axis} {x:g}", COLUMNS),
        config={
            **told(load, "window_s"),
            "utilisation": {
                f"{panel.name}, {axis} {x:g}": utilisation(panel, at, bench.seed)
                for (panel, axis, x), at in loads.items()
            },
        },
        plots=[
            line_plot(
                f"-{panel.model}-{AXES[axis][1]}",
                {c.name: curve(panel, axis, c).items() for c in (ACCELGEN, OURS, UPSTREAM, tuned(panel))},
                xlabel=axis,
                ylabel="tokens/s in time",
                title=f"{panel.name}, simulated A100",
                log_x=axis == "requests/s",
            )
            for panel, axis in curves
        ],
        workload=[workload_spec(panels[0], load, bench.seed)],
    )


def _rises(panel: str, axis: str, goodput: Mapping[float, float]) -> Claim:
    """Whether goodput rises, or holds, from each point of an axis to the next."""
    field, *_ = AXES[axis]
    holds = [after >= (1 - NOISE) * before for before, after in pairwise(goodput.values())]
    curve = ", ".join(f"{x:g}: {value:.0f}" for x, value in goodput.items())
    return Claim(
        name=f"{panel}: share of the steps along {axis} that do not lower goodput",
        paper=1.0,
        ours=sum(holds) / len(holds),
        headline=field == "rate_per_s",
        facts=f"tokens/s in time at {curve}",
        why=WHY[field],
    )
