"""Sarathi-Serve, Figures 9 and 10: capacity under objectives for the time between tokens.

Capacity is the highest Poisson rate whose P99 TBT meets the objective, with a median scheduling delay below 2 s,
bisected to 5 %. ``sarathi`` fits its budget to every step and is told the objective only; ``sarathi-published`` has the
paper's budgets (512 and 2048 tokens).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from vllm_ext.experiments.experiment import Findings, Variant, bar_plot, flat
from vllm_ext.experiments.papers import sarathi as base
from vllm_ext.experiments.runner import Runner, Sustained
from vllm_ext.report.claim import Claim
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
COMPARED = (VLLM_2023, ORCA, TUNED)
"""What Sarathi-Serve's capacity is divided by in the table."""


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
    return [
        own(ORCA, "orca", orca_seats, orca_seats * context, start=0.8 * eager),
        own(VLLM_2023, "vllm-2023", start=eager),
        Variant(name=VLLM, system="upstream-fcfs", engine={"max_num_seqs": seats}),
        *tuned,
        own(PAPERS, PAPERS, tokens=tokens, options={**objective, "budget": {"tokens": tokens}}),
        own(SARATHI, "sarathi", engine={"profiled": True}, options=objective),
        own(ORACLE, "oracle-sarathi", engine={"profiled": True}, options=objective),
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
    """A ratio of capacities that the paper states."""

    paper: float
    model: str
    over: str
    """The system below the line."""
    dataset: str | None = None
    """None: the largest over both."""
    slos: tuple[str, ...] = ()
    """Empty: the largest over all."""
    lowest: bool = False
    """The smallest instead."""
    headline: bool = False
    where: str = ""
    """Where the paper says so."""
    why: str = ""
    """Why ours may fall short."""


def claims(published: Published, found: Mapping[tuple[Cell, str], Sustained]) -> Iterator[Claim]:
    """Set a published ratio beside the paper's row and ours; nothing where nothing it speaks of was measured."""
    cells = [
        cell
        for cell, system in found
        if system == published.over
        and cell.model == published.model
        and published.dataset in (None, cell.dataset)
        and (not published.slos or cell.slo in published.slos)
    ]
    choose = min if published.lowest else max
    extent = "" if len(cells) == 1 else ", lowest" if published.lowest else ", up to"
    of = " ".join(filter(None, (published.model, published.dataset, "/".join(published.slos))))
    for system in (PAPERS, SARATHI) if cells else ():
        ratios = {c: found[c, system].rate_per_s / found[c, published.over].rate_per_s for c in cells}
        cell = choose(cells, key=ratios.__getitem__)
        said = "; ".join(_said(name, found[cell, name]) for name in (system, published.over))
        yield Claim(
            name=f"{of}: capacity of {system} / {published.over}{extent} ({published.where})",
            goal=published.paper,
            value=ratios[cell],
            headline=published.headline and system == PAPERS,
            facts=f"{cell.dataset} {cell.slo}: {said}. {published.why}".rstrip(". "),
        )


def _said(system: str, found: Sustained) -> str:
    limits = {TBT: "P99 TBT", DELAY: "delay"}
    return f"{system} {found.rate_per_s:.3g}/s, limited by {' and '.join(limits[name] for name in found.limited_by)}"


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
    slos: Sequence[str] = base.TABLE_3,
    slos_of_paper_systems: Sequence[str] = (),
) -> Findings:
    """Measure a figure: all systems on all panels, both data sets and all objectives.

    Args:
        runner: Runs simulations. If ``quick``: the last panel, the second data set and the first objectives only, and
            traces of 48 requests, too short a queue to compare systems by.
        panels: Models and their hardware.
        published: What the paper says of them.
        requests: Length of a trace.
        slos: Objectives.
        slos_of_paper_systems: Objectives under which only the systems that the paper compares are measured.
    """
    tolerance, datasets = 0.05, list(base.DATASETS)
    if runner.quick:
        panels, requests, slos_of_paper_systems = panels[-1:], 48, ()
        tolerance, datasets = 0.3, datasets[-1:]
    of = {panel.model: panel for panel in panels}
    cells = [Cell(model, data, slo) for model in of for data in datasets for slo in (*slos, *slos_of_paper_systems)]
    limits_ms = {cell: of[cell.model].slo_ms(cell.slo) for cell in cells}
    systems = {
        (cell, one.name): one
        for cell in cells
        for one in variants(of[cell.model], cell.dataset, cell.slo)
        if cell.slo not in slos_of_paper_systems or one.name in PAPER_SYSTEMS
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
    rates = {(cell, name): rate(found, cell, name) for name in SHOWN for cell in cells}
    return Findings(
        tables=[
            Table(
                ("capacity, requests/s", *SHOWN, *(f"{PAPERS} / {over}" for over in COMPARED)),
                [
                    [
                        str(cell),
                        *(rates[cell, name] for name in SHOWN),
                        *(rates[cell, PAPERS] / rates[cell, over] for over in COMPARED),
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


def _better_in_all_cases(panels: Sequence[base.Panel], why: str = "") -> list[Published]:
    return [
        Published(
            paper=1.0, model=panel.model, over=over, lowest=True, where="section 5.1: better in all cases", why=why
        )
        for panel in panels
        for over in (VLLM_2023, ORCA)
    ]


@base.PAPER.figure(
    "sarathi-fig9", "Figure 9", "Capacity under strict and relaxed P99-TBT objectives, Mistral-7B and Yi-34B"
)
def fig9(runner: Runner) -> Findings:
    """How many requests per second can a replica take before P99 TBT leaves its objective, or requests queue?

    Method: Mistral-7B on one A100 and Yi-34B on two, under the objectives of the paper's Table 3. ``--quick``:
    Mistral-7B on arxiv_summarization only.
    """
    mistral, yi, text = base.MISTRAL.model, base.YI.model, "section 5.1"
    published = [
        Published(paper=2.6, model=mistral, over=VLLM_2023, headline=True, where="abstract"),
        Published(paper=3.7, model=yi, over=VLLM_2023, headline=True, where="abstract of the published version"),
        Published(paper=2.8, model=yi, over=VLLM_2023, where="section 1"),
        Published(paper=2.7, model=yi, over=VLLM_2023, dataset=base.CHATS, slos=("relaxed",), where=text),
        Published(paper=3.2, model=mistral, over=ORCA, dataset=base.CHATS, slos=("strict",), where=text),
        *_better_in_all_cases((base.MISTRAL, base.YI)),
    ]
    return measure(runner, (base.YI, base.MISTRAL), published, requests=512)


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
        "paper's gain and cost Orca and vLLM most: the comparison favours them. As tensor parallel 8 instead, traces "
        "of 160 requests gave Falcon-180B 3.8 times vLLM's capacity (openchat_sharegpt4, strict), this way 3.4 times.",
        "All-reduces of the A40 cross PCIe (the paper's are connected pairwise); the A100 have NVLink among four.",
        *base.DIFFERENCES,
    ),
)
def fig10(runner: Runner) -> Findings:
    """As Figure 9, for models whose devices are tensor parallel 4 and pipeline parallel 2: eight A40, and eight A100.

    Method: the simulator has no pipeline: two engines of tensor parallel 4, each with the step time of all layers, half
    of the requests and half of the KV memory, stand for the two micro-batches in flight (see `Panel`). Capacity is that
    of both together. Objectives are 5 and 25 times a decode step of the simulated hardware, as the paper defines them;
    those of its Table 3 come from its own hardware and are measured beside. ``--quick``: Falcon-180B on
    arxiv_summarization only.
    """
    why = "pipeline bubbles, in which the paper's vLLM waits too, are not simulated"
    published = [
        *(
            Published(
                paper=6.9, model=base.FALCON.model, over=VLLM_2023, slos=s, headline=True, where="abstract", why=why
            )
            for s in (base.BY_RULE, base.TABLE_3)
        ),
        Published(
            paper=5.6,
            model=base.FALCON.model,
            over=VLLM_2023,
            slos=base.BY_RULE,
            where="abstract, published version",
            why=why,
        ),
        *_better_in_all_cases((base.LLAMA, base.FALCON), why),
    ]
    return measure(
        runner,
        (base.LLAMA, base.FALCON),
        published,
        requests=320,
        slos=base.BY_RULE,
        slos_of_paper_systems=base.TABLE_3,
    )
