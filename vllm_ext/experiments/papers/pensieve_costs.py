"""Pensieve, Figures 3.3 and 3.4: what a history costs that is computed again, by the cost model."""

from __future__ import annotations

from vllm_ext.experiments import steps
from vllm_ext.experiments.experiment import Findings
from vllm_ext.experiments.papers import pensieve as base
from vllm_ext.experiments.runner import Runner
from vllm_ext.experiments.steps import findings, roofline
from vllm_ext.report.claim import PaperClaim
from vllm_ext.simulation.cost.models import find_model
from vllm_ext.simulation.cost.roofline import Roofline
from vllm_ext.simulation.cost.step_shape import StepShape

NOT_SIMULATED = {
    "Figures 3.1, 3.2 and 3.5 to 3.9": "drawings",
    "Figures 3.10 and 3.11": "the data set: turns and contexts of ShareGPT, which the workload is drawn from",
    "Figure 3.17": "a kernel: measured on a CPU by benchmarks/attention/attention.py, results/attention.json",
}
"""Figures without an experiment, and why."""
MODELS = (base.OPT_13B.model, base.LLAMA_13B.model)
DIFFERENCES = (*steps.DIFFERENCES, "The text does not say which model it is: here both of 13B, on one A100-80GB.")
BATCH, PROMPT, GENERATED = 32, 32, 200
LONGEST = 16384
"""Tokens of the longest context in the paper's data."""


@base.PAPER.figure(
    "pensieve-fig3",
    "Figure 3.3",
    "Prefill with and without the history beside 200 steps of generation",
    (*DIFFERENCES, "A prefill is one step, however many tokens it has."),
)
def fig3(_: Runner) -> Findings:
    """From which history on does computing it again take longer than the generation that follows?

    Method: 32 requests with a prompt of 32 tokens behind a history generate 200 tokens each.
    """
    costs = {model: roofline(model) for model in MODELS}
    rows = {
        history: {
            f"{model}: {name}, s": seconds
            for model, cost in costs.items()
            for name, seconds in _turn(cost, history).items()
        }
        for history in (0, 256, 512, 1024, 2048, 4096, 8192, LONGEST)
    }
    claims = []
    for model, cost in costs.items():
        outgrown = next(h for h in range(0, 2 * LONGEST, 32) if _outgrows(cost, h))
        fit = base.KV_BYTES_PER_GPU // (BATCH * find_model(model).kv_bytes_per_token())
        claims.append(
            PaperClaim(name=f"{model}: history from which prefill outgrows generation, tokens: soon", kind="tendency",
                       op="<=", goal=fit, value=outgrown, headline=True,
                       facts=f"the paper's KV memory holds {fit} tokens of each of the {BATCH} requests")
        )  # fmt: skip
    return findings("history tokens", rows, claims, lines=[*rows[0]], ylabel="seconds", log_y=True)


def _outgrows(cost: Roofline, history: int) -> bool:
    again, _, generation = _turn(cost, history).values()
    return again > generation


def _turn(cost: Roofline, history: int) -> dict[str, float]:
    decodes = (StepShape.of_decodes(BATCH, history + PROMPT + generated) for generated in range(1, GENERATED + 1))
    return {
        "history computed again": cost.device_s(StepShape.of_rows([(history + PROMPT, 0)] * BATCH)),
        "history kept": cost.device_s(StepShape.of_rows([(PROMPT, history)] * BATCH)),
        "generation": sum(map(cost.device_s, decodes)),
    }


@base.PAPER.figure(
    "pensieve-fig4", "Figure 3.4", "Attention of 32 tokens over their context, relative to other operators", DIFFERENCES
)
def fig4(_: Runner) -> Findings:
    """What does the attention of a chunk cost, by the tokens before it, relative to all other operators of the layers?

    Method: one chunk of 32 tokens, Pensieve's unit of eviction.
    """
    costs = {model: roofline(model) for model in MODELS}
    chunks = {
        context: StepShape.of_chunk(32, context, sampled=False)
        for context in (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, LONGEST)
    }
    rows = {
        context: {
            model: attention / (cost.device_s(chunk) - attention)
            for model, cost in costs.items()
            for attention in [cost.attention_s(chunk)]
        }
        for context, chunk in chunks.items()
    }
    claims = [
        PaperClaim(name=f"{model}: attention over {LONGEST} tokens / over half of them: linear", kind="tendency",
                   goal=1.9, value=rows[LONGEST][model] / rows[LONGEST // 2][model], headline=True,
                   facts=f"{rows[LONGEST][model]:.2g} of all other operators there, {rows[1024][model]:.2g} at 1024")
        for model in MODELS
    ]  # fmt: skip
    return findings("context tokens", rows, claims, lines=MODELS, ylabel="attention / other operators")
