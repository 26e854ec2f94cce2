"""Sarathi-Serve, Figures 9 and 10: capacity under objectives for the time between tokens.

Capacity is the highest Poisson rate whose P99 TBT meets the objective, with a median scheduling delay below 2 s,
bisected to 5 %. Objectives are 5 and 25 times a decode step of the simulated hardware, as the paper defines them; those
of its Table 3 belong to its own. ``sarathi`` fits its budget to every step and is told the objective only;
``sarathi-published`` has the paper's budgets (512 and 2048 tokens).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from vllm_ext.experiments.experiment import Findings, Variant, bar_plot, flat
from vllm_ext.experiments.papers import sarathi as base
from vllm_ext.experiments.runner import Runner, Sustained
from vllm_ext.report.claim import PaperClaim, Reason, Verdict
from vllm_ext.report.table import Table

DELAY, TBT = "scheduling_delay_p50_s", "tbt_p99_ms"
DELAY_LIMIT_S = 2.0
"""Median scheduling delay above which a load is not sustained (section 5.1)."""
SARATHI, PAPERS, ORCA, VLLM_2023 = "sarathi", base.PAPER.row, "orca", "vllm-2023"
VLLM, TUNED, ORACLE = "vLLM 0.32", "vLLM 0.32, tuned", "oracle-sarathi"
TUNED_TOKENS = {True: (512, 1024), False: (2048, 4096)}
"""Token budgets a user of vLLM would try for a strict objective, or a relaxed one; the better one counts."""
SHOWN = (ORCA, VLLM_2023, VLLM, TUNED, PAPERS, SARATHI, ORACLE)
PAPER_SYSTEMS = (ORCA, VLLM_2023, PAPERS, SARATHI)
SLOW = ", half the GEMM efficiency"
HALF_THE_ARITHMETIC = {"gemm_efficiency": 0.375}
"""Of an A100, as far as the paper's kernels of 2024 may have been from ours: prompts take twice as long."""
COMPARED = ((PAPERS, VLLM_2023), (PAPERS, ORCA), (PAPERS, TUNED), (SARATHI, TUNED))
"""Ratios of capacities in the table."""


def variants(panel: base.Panel, dataset: str, slo: str) -> list[Variant]:
    """The systems of the figures, and vLLM of today, default and tuned (one per budget tried)."""
    seats, context, tokens = base.SEATS // panel.pipeline, base.CONTEXT[dataset], panel.tokens(slo)
    objective = {"slo": {"tbt_ms": panel.slo_ms(slo)}}
    orca_seats, eager = panel.orca_seats // panel.pipeline, 0.28 if base.is_strict(slo) else 0.5

    def own(name: str, system: str, seats: int = seats, tokens: int = context, **more: Any) -> Variant:
        engine = {"max_num_batched_tokens": tokens, "max_num_seqs": seats, "prefix_caching": False}
        return Variant(name=name, system=system, engine={**engine, **more.pop("engine", {})}, **more)

    tuned = [
        Variant(
            name=f"{TUNED} ({budget})",
            system="upstream-fcfs",
            engine={"max_num_seqs": seats, "max_num_batched_tokens": budget, "watermark": 0.05},
        )
        for budget in TUNED_TOKENS[base.is_strict(slo)]
    ]
    slow = []
    if (panel, dataset, slo) == (base.YI, base.CHATS, base.BY_RULE[1]):  # of which the paper states 2.7
        budget = {**objective, "budget": {"tokens": tokens}}
        slow = [
            own(VLLM_2023 + SLOW, "vllm-2023", start=eager / 2, cost=HALF_THE_ARITHMETIC),
            own(PAPERS + SLOW, PAPERS, tokens=tokens, options=budget, cost=HALF_THE_ARITHMETIC),
        ]
    return [
        own(ORCA, "orca", orca_seats, orca_seats * context, start=0.8 * eager),
        own(VLLM_2023, "vllm-2023", start=eager),
        Variant(name=VLLM, system="upstream-fcfs", engine={"max_num_seqs": seats}),
        *tuned,
        own(PAPERS, PAPERS, tokens=tokens, options={**objective, "budget": {"tokens": tokens}}),
        own(SARATHI, "sarathi", engine={"profiled": True}, options=objective),
        own(ORACLE, "oracle-sarathi", engine={"profiled": True}, options=objective),
        *slow,
    ]


class Cell(NamedTuple):
    """One group of bars."""

    model: str
    dataset: str
    slo: str

    def __str__(self) -> str:
        return " ".join(self)


@dataclass(frozen=True, kw_only=True)
class Published:
    """A ratio of capacities that the paper states, or where it only says that Sarathi-Serve's is higher."""

    model: str
    over: str
    """The system below the line."""
    paper: float = 1.0
    most: float | None = None
    """Where it states two for one thing: the higher."""
    kind: Literal["value", "up to", "tendency"] = "up to"
    """``tendency``: the smallest ratio is told, else the largest."""
    dataset: str | None = None
    """None: both."""
    strict: bool | None = None
    """None: under both objectives."""
    headline: bool = False
    where: str = ""
    """Where the paper says so."""
    reasons: Mapping[Verdict, Reason] = field(default_factory=dict)
    """Beside the one that is found in a cell."""


SATURATED: Mapping[Verdict, Reason] = {
    "below": Reason("queueing limits Sarathi-Serve here, not the objective", f"column `{PAPERS} limited by`"),
    "above": Reason("only queueing limits it, and today's engine queues later", f"column `{PAPERS} limited by`"),
}


def claims(published: Published, found: Mapping[tuple[Cell, str], Sustained]) -> Iterator[PaperClaim]:
    """Set a published ratio beside the paper's row and ours; nothing where nothing it speaks of was measured."""
    cells = [
        cell
        for cell, system in found
        if system == published.over
        and cell.model == published.model
        and cell.slo in base.BY_RULE
        and published.dataset in (None, cell.dataset)
        and published.strict in (None, base.is_strict(cell.slo))
    ]
    if not cells:
        return
    choose = min if published.kind == "tendency" else max

    def ratios(own: str, over: str) -> dict[Cell, float]:
        return {cell: rate(found, cell, own) / rate(found, cell, over) for cell in cells}

    of_paper = ratios(PAPERS, published.over)
    cell = choose(cells, key=of_paper.__getitem__)
    extent = "" if len(cells) == 1 else ", lowest" if published.kind == "tendency" else ", up to"
    objective = {None: "", True: "strict", False: "relaxed"}[published.strict]
    of = " ".join(filter(None, (published.model, published.dataset, objective)))
    told = "; ".join(_told(name, found[cell, name]) for name in (PAPERS, published.over))
    if (cell, published.over + SLOW) in found:
        slower = rate(found, cell, PAPERS + SLOW) / rate(found, cell, published.over + SLOW)
        told += f"; {slower:.3g} with half the GEMM efficiency"
    queued = found[cell, PAPERS].limited_by == (DELAY,)
    yield PaperClaim(
        name=f"{of}: capacity of {PAPERS} / {published.over}{extent} ({published.where})",
        goal=published.paper,
        most=published.most,
        kind=published.kind,
        value=of_paper[cell],
        ours=choose(ratios(SARATHI, published.over).values()),
        tuned=choose(ratios(SARATHI, TUNED).values()),
        headline=published.headline,
        facts=f"{cell.dataset} {cell.slo}: {told}",
        reasons={**(SATURATED if queued else {}), **published.reasons},
    )


def _limits(found: Sustained) -> str:
    return " and ".join({TBT: "P99 TBT", DELAY: "delay"}[name] for name in found.limited_by)


def _told(system: str, found: Sustained) -> str:
    return f"{system} {found.rate_per_s:.3g}/s, limited by {_limits(found)}"


def rate(found: Mapping[tuple[Cell, str], Sustained], cell: Cell, system: str) -> float:
    """Return a capacity in requests/s, NaN if not measured; of the tuned vLLM, that of its better budget."""
    rates = (one.rate_per_s for (c, name), one in found.items() if c == cell and name.split(" (")[0] == system)
    return max(rates, default=math.nan)


def measure(
    runner: Runner,
    panels: Sequence[base.Panel],
    published: Sequence[Published],
    *,
    requests: int,
) -> Findings:
    """Measure a figure: all systems on all panels and both data sets, the paper's also under its Table 3.

    Args:
        runner: Runs simulations. If ``quick``: the last panel, the second data set and the first objectives only, and
            traces of 48 requests, too short a queue to compare systems by.
        panels: Models and their hardware.
        published: What the paper says of them.
        requests: Length of a trace.
    """
    tolerance, datasets = 0.05, list(base.DATASETS)
    slos: Sequence[str] = (*base.BY_RULE, *base.TABLE_3)
    if runner.quick:
        panels, requests, slos = panels[-1:], 48, base.BY_RULE
        tolerance, datasets = 0.3, datasets[-1:]
    of = {panel.model: panel for panel in panels}
    cells = [Cell(model, data, slo) for model in of for data in datasets for slo in slos]
    limits_ms = {cell: of[cell.model].slo_ms(cell.slo) for cell in cells}
    systems = {
        (cell, one.name): one
        for cell in cells
        for one in variants(of[cell.model], cell.dataset, cell.slo)
        if cell.slo in base.BY_RULE or one.name in PAPER_SYSTEMS
    }
    found = runner.sustained(
        {
            (cell, name): partial(base.spec, one, of[cell.model], cell.dataset, requests=requests, seed=runner.seed)
            for (cell, name), one in systems.items()
        },
        lambda key: {TBT: limits_ms[key[0]], DELAY: DELAY_LIMIT_S},
        start_per_s=lambda key: systems[key].start * of[key[0].model].rate_per_s[key[0].dataset],
        tolerance=tolerance,
    )
    shown = (*SHOWN, VLLM_2023 + SLOW, PAPERS + SLOW)
    rates = {(cell, name): rate(found, cell, name) for name in shown for cell in cells}
    return Findings(
        tables=[
            Table(
                ("capacity, requests/s", *SHOWN, *map(" / ".join, COMPARED), f"{PAPERS} limited by"),
                [
                    [
                        str(cell),
                        *(rates[cell, name] for name in SHOWN),
                        *(rates[cell, own] / rates[cell, over] for own, over in COMPARED),
                        _limits(found[cell, PAPERS]),
                    ]
                    for cell in cells
                ],
            )
        ],
        claims=[claim for one in published for claim in claims(one, found)],
        **flat(
            {(*key, name): {"capacity_requests_per_s": x} for (key, name), x in rates.items() if not math.isnan(x)},
            "{}.{}.{}.".format,
            own={PAPERS: ""},
        ),
        config={
            "requests": requests,
            "tolerance": tolerance,
            "scheduling_delay_p50_limit_s": DELAY_LIMIT_S,
            "tbt_p99_limit_ms": {f"{cell.model} {cell.slo}": limit for cell, limit in limits_ms.items()},
        },
        details={"limited_by": {f"{cell} {name}": list(one.limited_by) for (cell, name), one in found.items()}},
        plots=[
            bar_plot(
                f"-{data.split('_')[0]}",
                [f"{cell.model}, {cell.slo}" for cell in cells if cell.dataset == data],
                {name: [rates[cell, name] for cell in cells if cell.dataset == data] for name in SHOWN},
                ylabel="capacity (requests/s)",
                title=f"{data} lengths, simulated",
            )
            for data in datasets
        ],
        workload=base.WORKLOAD,
    )


def _better_in_all_cases(panels: Sequence[base.Panel]) -> list[Published]:
    where = "section 5.1: better in all cases"
    return [
        Published(model=panel.model, over=over, kind="tendency", where=where)
        for panel in panels
        for over in (VLLM_2023, ORCA)
    ]


@base.PAPER.figure(
    "sarathi-fig9",
    "Figure 9",
    "Capacity under strict and relaxed P99-TBT objectives, Mistral-7B and Yi-34B",
    (
        "Objectives follow the paper's rule on the simulated hardware: 5 and 25 times a decode step of 32 requests "
        "with 4k tokens, which takes 20 ms for Mistral-7B and 33 ms for Yi-34B. The paper's systems are measured under "
        "its Table 3 too: 0.1 and 0.5 s, as by the rule, and for Yi-34B 0.2 and 1 s, which gives Sarathi less of an "
        "advantage. The rule was chosen after Table 3's had been tried.",
        "For Yi-34B over vLLM this text states up to 2.8 (section 1), the published version 3.7: a range here.",
        *base.DIFFERENCES,
    ),
)
def fig9(runner: Runner) -> Findings:
    """How many requests per second can a replica take before P99 TBT leaves its objective, or requests queue?

    Method: Mistral-7B on one A100 and Yi-34B on two. ``--quick``: Mistral-7B on arxiv_summarization only.
    """
    mistral, yi, text = base.MISTRAL.model, base.YI.model, "section 5.1"
    published = [
        Published(model=mistral, over=VLLM_2023, paper=2.6, headline=True, where="abstract"),
        Published(model=yi, over=VLLM_2023, paper=2.8, most=3.7, headline=True, where="both versions"),
        Published(model=yi, over=VLLM_2023, paper=2.7, kind="value", dataset=base.CHATS, strict=False, where=text),
        Published(model=mistral, over=ORCA, paper=3.2, kind="value", dataset=base.CHATS, strict=True, where=text),
        *_better_in_all_cases((base.MISTRAL, base.YI)),
    ]
    return measure(runner, (base.YI, base.MISTRAL), published, requests=512)


NO_PIPELINE: Mapping[Verdict, Reason] = {
    "not comparable": Reason(
        "two engines stand for two stages, without bubbles", "docs/simulator-inputs.md: not modelled"
    )
}


@base.PAPER.figure(
    "sarathi-fig10",
    "Figure 10",
    "Capacity under strict and relaxed P99-TBT objectives, LLaMA2-70B and Falcon-180B",
    (
        "Objectives follow the paper's rule on the simulated hardware: 5 and 25 times a decode step (32 requests with "
        "4k tokens) of 91 ms for LLaMA2-70B and 61 ms for Falcon-180B. The paper's step takes 200 ms by the same rule, "
        "so that its 1 and 5 s (Table 3) are 11 to 82 steps here; the paper's systems are measured under them too. "
        "The rule was chosen after Table 3's had been tried: they give Sarathi less of an advantage.",
        "Tensor parallel 4 with two pipeline stages is simulated as two engines that do not wait for each other: "
        "either has the step time of all layers on 4 devices and half of arrivals, seats and KV memory. Pipeline "
        "bubbles, where decodes wait behind the other micro-batch's prompts, are left out. They are part of the "
        "paper's gain and cost Orca and vLLM most, so that the figure is not comparable. As tensor parallel 8 instead, "
        "traces of 160 requests gave Falcon-180B 3.8 times vLLM's capacity (openchat_sharegpt4, strict), this way 3.4.",
        "For Falcon-180B this text states up to 6.9, the published version 5.6: a range here.",
        "All-reduces of the A40 cross PCIe (the paper's are connected pairwise); the A100 have NVLink among four.",
        *base.DIFFERENCES,
    ),
)
def fig10(runner: Runner) -> Findings:
    """As Figure 9, for models whose devices are tensor parallel 4 and pipeline parallel 2: eight A40, and eight A100.

    Method: the simulator has no pipeline: two engines of tensor parallel 4, each with the step time of all layers, half
    of the requests and half of the KV memory, stand for the two micro-batches in flight (see `Panel`). Capacity is that
    of both together. ``--quick``: Falcon-180B on arxiv_summarization only.
    """
    published = Published(
        model=base.FALCON.model, over=VLLM_2023, paper=5.6, most=6.9, headline=True, where="both versions",
        reasons=NO_PIPELINE,
    )  # fmt: skip
    return measure(runner, (base.LLAMA, base.FALCON), [published], requests=320)
