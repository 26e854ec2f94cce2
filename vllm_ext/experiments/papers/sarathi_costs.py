"""Sarathi-Serve, Figures 3, 5, 6 and 7: what tokens, batches and tiles cost, by the cost model."""

from __future__ import annotations

from vllm_ext.experiments import steps
from vllm_ext.experiments.experiment import Findings
from vllm_ext.experiments.papers import sarathi as base
from vllm_ext.experiments.runner import Runner
from vllm_ext.experiments.steps import findings, roofline
from vllm_ext.report.claim import PaperClaim, Reason
from vllm_ext.report.table import Table
from vllm_ext.simulation.cost.devices import find_device
from vllm_ext.simulation.cost.models import find_model
from vllm_ext.simulation.cost.step_shape import StepShape

NOT_SIMULATED = {
    "Figure 2": "a drawing",
    "Figure 4": "a drawing of schedules, without numbers",
}
"""Figures without an experiment, and why."""
DIFFERENCES = (*steps.DIFFERENCES, base.DIFFERENCES[-1])
MISTRAL, LLAMA, A100 = base.MISTRAL.model, base.LLAMA.model, "a100-80"


@base.PAPER.figure("sarathi-fig3", "Figure 3", "Throughput of prefill and of decode over the batch size", DIFFERENCES)
def fig3(_: Runner) -> Findings:
    """What does a larger batch bring to prefill, and what to decode?

    Method: Mistral-7B on one A100; prompts of 1024 tokens, and decodes behind as many.
    """
    cost, prompt, large = roofline(MISTRAL), 1024, 32
    rows = {
        batch: {
            "prefill tokens/s": batch * prompt / cost.device_s(StepShape.of_rows([(prompt, 0)] * batch)),
            "decode tokens/s": batch / cost.device_s(StepShape.of_decodes(batch, prompt + 1)),
        }
        for batch in (1, 2, 4, 8, 16, large, 64)
    }
    prefill, decode = (rows[large][column] / rows[1][column] for column in rows[1])
    claims = [
        PaperClaim(name=f"throughput of prefill, batch of {large} / of 1: marginal", kind="tendency", op="<=",
                   goal=1.25, value=prefill, headline=True),
        PaperClaim(name=f"throughput of decode, batch of {large} / of 1: almost linear, at least half of it",
                   kind="tendency", goal=large / 2, value=decode, headline=True),
    ]  # fmt: skip
    return findings("batch", rows, claims, lines=[*rows[1]], ylabel="tokens/s", log_x=True, log_y=True)


@base.PAPER.figure("sarathi-fig5", "Figure 5", "Time of prefill and of decode by operator and input size", DIFFERENCES)
def fig5(_: Runner) -> Findings:
    """Do linear operators take most of a step, and how much longer with 128 tokens than with one?

    Method: Mistral-7B on one A100; one prompt, or one decode behind as many tokens. Linear operators are those of the
    layers. Beside them: the same by the paper's rule, the longer of computing and reading.
    """
    cost, rule = roofline(MISTRAL), roofline(MISTRAL, unhidden=0.0)
    rows = {}
    for tokens in (128, 256, 512, 1024, 2048, 4096, 8192):
        for phase, shape in (("prefill", StepShape.of_chunk(tokens)), ("decode", StepShape.of_decodes(1, tokens))):
            linear, attention, step = cost.linear_s(shape.num_tokens), cost.attention_s(shape), cost.device_s(shape)
            rows[f"{phase} {tokens}"] = {
                "linear, ms": 1000 * linear,
                "attention, ms": 1000 * attention,
                "others, ms": 1000 * (step - linear - attention),
                "linear share": linear / step,
                "linear by max(math, memory), ms": 1000 * rule.linear_s(shape.num_tokens),
            }
    hidden = Reason("a quarter of the shorter of reading and computing adds", "column `linear by max(math, memory)`")
    claims = [
        PaperClaim(name="linear operators, 128 prefill tokens / 1 decode token: nearly the same", goal=1.0,
                   value=cost.linear_s(128) / cost.linear_s(1), headline=True, reasons={"above": hidden}),
        PaperClaim(name="linear operators' share of the time, least over the rows: the majority", kind="tendency",
                   op=">", goal=0.5, value=min(cells["linear share"] for cells in rows.values()), headline=True),
    ]  # fmt: skip
    return findings("tokens", rows, claims)


@base.PAPER.figure("sarathi-fig6", "Figure 6", "Arithmetic intensity of linear operators over the tokens", DIFFERENCES)
def fig6(_: Runner) -> Findings:
    """How much of four A100's compute and bandwidth do LLaMA2-70B's linear operators use, by the tokens of a step?"""
    split, decodes, prefill = 4, 32, 2048
    cost, model, device = roofline(LLAMA, tensor_parallel=split), find_model(LLAMA), find_device(A100)
    read = model.linear_parameters * model.weight_bytes_per_parameter / split
    rows = {}
    for tokens in (1, 8, decodes, 128, 256, 512, 1024, prefill, 4096):
        flops, time = 2 * model.linear_parameters * tokens / split, cost.linear_s(tokens)
        rows[tokens] = {
            "FLOP/byte": flops / read,
            "share of the balance": flops / read / (device.peak_flops / device.memory_bytes_per_s),
            "share of the peak FLOP/s": flops / time / device.peak_flops,
            "share of the bandwidth": read / time / device.memory_bytes_per_s,
        }
    columns = ("share of the peak FLOP/s", "share of the bandwidth")
    compute, bandwidth = (rows[decodes][column] / rows[prefill][column] for column in columns)
    claims = [
        PaperClaim(name=f"compute used, {decodes} decodes / {prefill} prefill tokens: low", kind="tendency", op="<=",
                   goal=0.5, value=compute, headline=True),
        PaperClaim(name=f"bandwidth used, {prefill} prefill tokens / {decodes} decodes: sub-optimal", kind="tendency",
                   op="<=", goal=0.5, value=1 / bandwidth, headline=True),
    ]  # fmt: skip
    return findings("tokens", rows, claims, lines=columns, ylabel="share", log_x=True)


@base.PAPER.figure(
    "sarathi-fig7",
    "Figure 7 and section 4.3",
    "Time of linear operators over the tokens, and what one token more than whole tiles costs",
    (*DIFFERENCES, "Where a matrix product turns from reading to computing is where both take as long by themselves."),
)
def fig7(_: Runner) -> Findings:
    """Up to how many tokens do linear operators take the time of reading their weights, and what does a tile cost?

    Method: LLaMA2-70B on 1 to 8 A100. Tiles: one chunk of 257 tokens against one of 256, whole steps of four models.
    """
    costs = {f"TP-{split}, ms": roofline(LLAMA, tensor_parallel=split) for split in (1, 2, 4, 8)}
    tokens = (1, 64, 128, 256, 257, 384, 512, 1024, 2048, 4096)
    rows = {at: {name: 1000 * cost.linear_s(at) for name, cost in costs.items()} for at in tokens}
    balance = {
        name: (device.peak_flops / device.memory_bytes_per_s,
               device.peak_flops * device.gemm_efficiency / (device.memory_bytes_per_s * device.weight_efficiency))
        for name in ("a100-40", A100) for device in (find_device(name),)
    }  # fmt: skip
    longer = {}
    for panel in (base.MISTRAL, base.YI, base.LLAMA, base.FALCON):
        both = (roofline(panel.model, A100, panel.tensor_parallel, **more) for more in ({}, {"tile_tokens": 1}))
        longer[panel.model] = [cost.device_s(StepShape.of_chunk(257)) / cost.device_s(StepShape.of_chunk(256)) - 1
                               for cost in both]  # fmt: skip
    split = Reason("an eighth of TP-1 at any length: no fixed time", "column `TP-8`")
    claims = [
        PaperClaim(name="tokens from which linear operators are bound by compute, in theory", goal=200.0,
                   value=balance[A100][0], headline=True,
                   reasons={"below": Reason("200 are the A100-40GB's, which reads more slowly", "row `a100-40`")}),
        PaperClaim(name="the same in practice, with more tensor parallelism", goal=500.0, most=600.0,
                   value=balance[A100][1], headline=True, reasons={"below": split}),
        PaperClaim(name="TP-8: time of 512 tokens / of 128: largely stagnant", kind="tendency", op="<=", goal=1.5,
                   value=rows[512]["TP-8, ms"] / rows[128]["TP-8, ms"], reasons={"tendency": split}),
        PaperClaim(name="a chunk of 257 tokens over one of 256, longer by, fraction", kind="up to", goal=0.32,
                   value=max(whole for whole, _ in longer.values()), headline=True,
                   facts=", ".join(f"{model}: {whole:.2f}" for model, (whole, _) in longer.items()),
                   reasons={"above": Reason("beyond 256 tokens tiles have 128", "column `without tiles`")}),
    ]  # fmt: skip
    beside = [
        Table(("device", "FLOP/byte of the datasheet", "reached"), [(name, *at) for name, at in balance.items()]),
        Table(("257 tokens over 256", "longer by", "without tiles"), [(name, *at) for name, at in longer.items()]),
    ]
    return findings("tokens", rows, claims, beside=beside, lines=[*costs], ylabel="ms", log_x=True, log_y=True)
