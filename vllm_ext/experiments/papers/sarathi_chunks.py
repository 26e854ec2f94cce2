"""Sarathi-Serve, Figures 1, 8 and 11: stalls of decodes, and what chunks spare and cost."""

from __future__ import annotations

from itertools import pairwise, permutations

from vllm_ext.experiments.experiment import Findings, flat, line_plot
from vllm_ext.experiments.papers import sarathi as base
from vllm_ext.experiments.papers import sarathi_capacity as capacity
from vllm_ext.experiments.papers.sarathi_costs import DIFFERENCES, LLAMA, MISTRAL
from vllm_ext.experiments.runner import Runner
from vllm_ext.experiments.steps import findings, roofline
from vllm_ext.report.claim import PaperClaim, Reason, Verdict
from vllm_ext.report.table import Table
from vllm_ext.simulation.cost.roofline import Roofline
from vllm_ext.simulation.cost.step_shape import StepShape

LONGEST, P99 = "tbt_max_ms", "tbt_p99_ms"
RATES, QUICK_RATES = (0.1, 0.2, 0.3, 0.4, 0.5), (0.2, 0.4)
CALM = 0.2
"""A rate that vLLM of 2023 sustains: what stalls a decode there is no queue."""


@base.PAPER.figure(
    "sarathi-fig1",
    "Figure 1",
    "Longest and P99 time between tokens over the load, Yi-34B on two A100",
    (
        *base.DIFFERENCES,
        "The text names no rates: here they are 0.1 to 0.5/s, the last beyond Sarathi-Serve's capacity. Token budgets "
        "are those of the strict objective.",
    ),
    repeats=5,
)
def fig1(runner: Runner) -> Findings:
    """For how long do prompts stall decodes, and what becomes of P99 TBT as the load grows?

    Method: traces of 128 requests with the lengths of arxiv_summarization, as in the paper, over several rates.
    """
    rates = QUICK_RATES if runner.quick else RATES
    shown = {one.name: one for one in capacity.variants(base.YI, base.ARTICLES, "strict")}
    del shown[capacity.ORCA], shown[capacity.ORACLE]
    specs = {
        (rate, name): base.spec(one, base.YI, base.ARTICLES, rate, requests=base.REQUESTS, seed=runner.seed)
        for rate in rates
        for name, one in shown.items()
    }
    found = {
        key: {metric: metrics[metric] for metric in (LONGEST, P99)} for key, metrics in runner.metrics(specs).items()
    }
    tuned = [name for name in shown if name.startswith(capacity.TUNED)]

    def over(name: str, other: str, metric: str, rate: float) -> float:
        return found[rate, name][metric] / found[rate, other][metric]

    claims = [
        PaperClaim(name=f"longest stall of a decode in vLLM of 2023 at {CALM:g}/s, s: several", kind="tendency",
                   goal=2.0, value=found[CALM, capacity.VLLM_2023][LONGEST] / 1000, headline=True),
        *(
            PaperClaim(
                name=f"{what} at {at:g}/s, vLLM of 2023 / Sarathi-Serve", kind="tendency", goal=1.0, headline=True,
                value=over(capacity.VLLM_2023, capacity.PAPERS, metric, at),
                ours=over(capacity.VLLM_2023, capacity.SARATHI, metric, at),
                tuned=min(over(name, capacity.SARATHI, metric, at) for name in tuned),
            )
            for what, metric, at in (("longest time between tokens", LONGEST, CALM), ("P99 TBT", P99, rates[-1]))
        ),
    ]  # fmt: skip
    return Findings(
        tables=[Table(("requests/s", "system", "longest, ms", "P99, ms"),
                      [(*key, *cells.values()) for key, cells in found.items()])],
        claims=claims,
        **flat(found, "rate_{:g}.".format, own={capacity.PAPERS: ""}),
        config={"requests": base.REQUESTS, "rates_per_s": list(rates)},
        plots=[line_plot("", {name: [(rate, found[rate, name][P99]) for rate in rates] for name in shown},
                         xlabel="requests/s", ylabel="P99 TBT (ms)", title="Yi-34B, arxiv lengths, simulated")],
        workload=base.WORKLOAD[-1:],
    )  # fmt: skip


@base.PAPER.figure(
    "sarathi-fig8",
    "Figure 8",
    "Decodes with a whole prompt, and with a chunk, over decodes alone",
    (
        *DIFFERENCES,
        "The text names token budgets, but neither prompts nor batches: here prompts and contexts have 1024 to 8192 "
        "tokens. A chunk fills the budget and is the last one of a prompt of 8192 tokens.",
    ),
)
def fig8(_: Runner) -> Findings:
    """How much longer is a step of decodes that a whole prompt joins, and one that a chunk joins?

    Method: Mistral-7B on one A100 with a budget of 256 tokens, LLaMA2-70B on four with 512.
    """
    prompts = (1024, 2048, 4096, 8192)
    rows = {}
    for model, split, budget in ((MISTRAL, 1, 256), (LLAMA, 4, 512)):
        cost = roofline(model, tensor_parallel=split)
        for batch in (8, 16, 32):
            size = budget - batch
            joined = {f"prompt of {tokens}": StepShape.of_chunk(tokens) for tokens in prompts}
            joined["chunk"] = StepShape.of_chunk(size, prompts[-1] - size)
            for context in (1024, 4096, 8192):
                decodes = StepShape.of_decodes(batch, context)
                alone = cost.device_s(decodes)
                more = {name: cost.device_s(decodes.plus(shape)) / alone for name, shape in joined.items()}
                rows[model, batch, context] = {"decodes, ms": 1000 * alone, **more}
    largest = {name: max(cells[name] for cells in rows.values()) for name in joined}
    grown = [
        (rows[one]["chunk"], rows[other]["chunk"])
        for one, other in permutations(rows, 2)
        if one[0] == other[0] and one[1] <= other[1] and one[2] <= other[2]
    ]
    whole = max(largest.values())
    unknown = Reason("the text names no length of the prompt", "columns `prompt of 1024` to `prompt of 8192`")
    claims = [
        PaperClaim(name="step with a whole prompt / of decodes alone", kind="up to", goal=28.3, value=whole,
                   facts="largest by column: " + ", ".join(f"{name} {ratio:.3g}" for name, ratio in largest.items()),
                   headline=True, reasons={"not comparable": unknown}),
        PaperClaim(name="largest ratio with a chunk / with a whole prompt: a much tighter bound", kind="tendency",
                   op="<=", goal=0.5, value=largest["chunk"] / whole, headline=True),
        PaperClaim(name="share of pairs of rows in which a chunk weighs less on the larger batch or context",
                   kind="tendency", goal=1.0, value=sum(after <= before for before, after in grown) / len(grown)),
    ]  # fmt: skip
    return findings("step", {", ".join(map(str, at)): cells for at, cells in rows.items()}, claims)


@base.PAPER.figure(
    "sarathi-fig11",
    "Figure 11",
    "Overhead of chunks by operator, Yi-34B on two A100",
    (*DIFFERENCES, "The text names one chunk size, 2048, and no prompts: here they have 4096 to 16384 tokens."),
)
def fig11(_: Runner) -> Findings:
    """How much longer does a prompt take in chunks, by operator?

    Method: the time of all chunks of one prompt over that of the prompt in one step.
    """
    cost = roofline(base.YI.model, tensor_parallel=base.YI.tensor_parallel)
    sizes, prompts = (512, 1024, 2048), (4096, 8192, 16384)
    found = {
        (prompt, size): {name: time / whole[name] for name, time in _times(cost, prompt, size).items()}
        for prompt in prompts
        for whole in [_times(cost, prompt, prompt)]
        for size in sizes
    }
    most = {name: max(cells[name] for cells in found.values()) for name in found[prompts[0], sizes[0]]}
    falls = [
        found[prompt, large][name] <= found[prompt, small][name] + 1e-12
        for prompt in prompts
        for small, large in pairwise(sizes)
        for name in most
    ]
    hidden = Reason("attention computes for longer than it reads KV again", "column `attention`")
    reasons_of: dict[str, dict[Verdict, Reason]] = {"attention": {"tendency": hidden}, "all-reduce": {}}
    claims = [
        PaperClaim(name="linear operators in chunks of 2048, over one step: close to no overhead", op="<=", goal=1.0,
                   value=max(found[prompt, 2048]["linear"] for prompt in prompts), headline=True),
        *(
            PaperClaim(name=f"largest overhead of {name} / of linear operators: higher", kind="tendency", goal=1.0,
                       op=">", value=most[name] / most["linear"], headline=True, reasons=reasons)
            for name, reasons in reasons_of.items()
        ),
        PaperClaim(name="overhead of the whole / of linear operators, largest: close to it", kind="tendency", op="<=",
                   goal=1.1, value=max(cells["all"] / cells["linear"] for cells in found.values())),
        PaperClaim(name="share of the steps to a larger chunk that raise no overhead", kind="tendency", goal=1.0,
                   value=sum(falls) / len(falls)),
    ]  # fmt: skip
    return findings("prompt, chunk", {f"{prompt}, {size}": cells for (prompt, size), cells in found.items()}, claims)


def _times(cost: Roofline, prompt: int, size: int) -> dict[str, float]:
    """Return the seconds that operators take for a prompt in chunks of so many tokens."""
    chunks = [StepShape.of_chunk(size, held, sampled=held + size == prompt) for held in range(0, prompt, size)]
    return {
        "linear": len(chunks) * cost.linear_s(size),
        "attention": sum(map(cost.attention_s, chunks)),
        "all-reduce": len(chunks) * cost.all_reduce_s(size),
        "all": sum(map(cost.device_s, chunks)),
    }
