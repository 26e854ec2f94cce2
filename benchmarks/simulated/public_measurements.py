"""Does the cost model reproduce what others measured of the token budget?

Question: `vllm-ext plan` recommends token budgets by simulated runs. Three public measurements say what a budget did to
a server. Does the simulator show the same direction, and the same ratio within 15 %?

Method: the real schedulers in virtual time; all that was published of a run is set as published. *vllm#17885*
(https://github.com/vllm-project/vllm/pull/17885): Llama-3.1-70B on two and four A100 of 80 GB, 400 ShareGPT requests at
once, total tokens/s, with vLLM's defaults before (8192 tokens, 1024 seats) and after (2048, 256). Lengths are drawn: a
preset scaled to means of 225 and 200 tokens (vllm#18566 prints 230 and 203 of such a data set). The row *sampler of
2025* takes the memory of the logits from vllm#13594, which prints the KV size with and without the sampler in the
profile; the cost model has today's. *vllm#52906* (https://github.com/vllm-project/vllm/issues/52906, a comment of
2026-08-30): Qwen3.6-35B-A3B in 8 bits on a GB10, 8 clients with prompts of 16K tokens beside 4 or 16 that decode, a cap
on the prefill tokens of a step. The simulator has no such cap: the budget is the cap and a token for each decoding
client. Once by the data sheet, and once with one constant, the share of the peak that matrix products reach, set so
that the prefill rate without a cap comes out. *inference-sim#339*
(https://github.com/inference-sim/inference-sim/issues/339): a simulator's own result, with its formula of the step time
(PR 335, H-Liveness, rounds 2b and 2c), one of its four equal servers, 8 seats, prompts of 32 and 512 tokens; shortest
job first is vLLM's priority scheduler. *default lengths*: the same with the lengths its command line has if no workload
is named.

    python benchmarks/simulated/public_measurements.py --quick
    python benchmarks/simulated/public_measurements.py --jobs 2 --out benchmarks/results/public_measurements.json
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

import numpy as np
import simulated

from vllm_ext.experiments.experiment import Experiment, Findings
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.claim import Claim
from vllm_ext.report.results import Workload
from vllm_ext.report.table import Table
from vllm_ext.simulation.cost import spec as costs
from vllm_ext.simulation.cost.devices import find_device
from vllm_ext.simulation.cost.fitted import Fitted, StepCurve
from vllm_ext.simulation.cost.model_shape import Experts, ModelShape
from vllm_ext.simulation.cost.spec import CostSpec, Hardware, HardwareSpec
from vllm_ext.simulation.measure.metrics import summarise
from vllm_ext.simulation.run import simulate
from vllm_ext.simulation.spec import EngineSpec, SimulationSpec
from vllm_ext.simulation.workloads.requests import SimRequest
from vllm_ext.simulation.workloads.spec import WorkloadSpec

FCFS, PRIORITY = "upstream-fcfs", "upstream-priority"
WITHIN = 0.15
_NO_EFFECT = 0.005
"""A published ratio no further from 1 has no direction."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published figure beside the simulated one."""

    name: str
    published: float
    simulated: float
    held: bool = True
    """Whether it is a ratio, which is held to the goals; others are shown."""
    why: str = ""
    """Why the simulated one is another."""

    @property
    def over(self) -> float:
        """Simulated over published."""
        return self.simulated / self.published

    @property
    def effect(self) -> float | None:
        """Logarithm of the simulated ratio over that of the published: above 0 in the same direction; None: of none."""
        if not self.held or abs(self.published - 1) <= _NO_EFFECT:
            return None
        return math.log(self.simulated) / math.log(self.published)

    @property
    def reproduced(self) -> bool:
        """Whether the ratio is within the goal, and in the same direction."""
        return abs(self.over - 1) <= WITHIN and (self.effect is None or self.effect > 0)


def claims(rows: Iterable[Row]) -> Iterator[Claim]:
    """Hold the ratios to the goals."""
    for row in rows:
        if row.effect is not None:
            yield Claim(name=f"{row.name}: share of the published effect", value=round(row.effect, 4), op=">", goal=0,
                        why=row.why)  # fmt: skip
        if row.held:
            yield Claim(name=f"{row.name}: distance from the published ratio", value=round(abs(row.over - 1), 4),
                        op="<=", goal=WITHIN, why=row.why)  # fmt: skip


# vllm#17885

A100_TOKENS_PER_S = {2: (1054.01, 1438.49), 4: (3053.03, 2994.03)}
"""Devices -> published total tokens/s before and after."""
BEFORE, AFTER, BUDGET_ALONE = (8192, 1024), (2048, 256), (8192, 256)
"""Token budget and seats; the last is what only the budget changes from."""
MEMORY_OF_TODAY, SAMPLER_OF_2025 = "today's memory", "sampler of 2025"
LOGIT_BYTES = (2_039_760 - 1_980_832) * 12 * 2 * 768 * 2 / (1024 * 50_272)
"""Peak per logit of that sampler, which sorts: KV tokens lost, times those of OPT-125M, over 1,024 rows of logits."""
_COUNTED_LOGIT_BYTES = 8
_SORTS = "the KV that 1,024 seats leave is not known: a bound from another model's log"
_A100_WHY = {
    (2, MEMORY_OF_TODAY): "the sampler of that version took five times the memory of today's, with 1,024 seats 5 GB",
    (2, SAMPLER_OF_2025): _SORTS,
    (4, MEMORY_OF_TODAY): "2 %: no run-to-run spread is published",
    (4, SAMPLER_OF_2025): "2 %: no run-to-run spread is published",
}


def a100(devices: int, limits: tuple[int, int], memory: str, seed: int) -> SimulationSpec:
    """Return a run of vllm#17885."""
    tokens, seats = limits
    hardware = HardwareSpec(
        model="llama-3.1-70b", device="a100-80", tensor_parallel=devices, gpu_memory_utilization=0.95
    )
    if memory == SAMPLER_OF_2025:
        _, model, device = hardware.resolve()
        more = (LOGIT_BYTES - _COUNTED_LOGIT_BYTES) * seats * model.vocab
        taken = model.weight_bytes(devices) + costs.activation_bytes(model, tokens, seats, devices) + more
        left = int(device.memory_bytes * hardware.gpu_memory_utilization - taken)
        hardware = hardware.model_copy(update={"kv_memory_bytes": left})
    return SimulationSpec(
        engine=EngineSpec(system=FCFS, max_num_batched_tokens=tokens, max_num_seqs=seats, max_model_len=10_000,
                          async_scheduling=False),
        hardware=hardware,
        workload=WorkloadSpec(source="sharegpt-vllm", scale_prompt=4.0, scale_output=0.6, min_prompt_tokens=4,
                              max_prompt_tokens=1024, min_output_tokens=4, max_output_tokens=2044, arrivals="at-once",
                              num_requests=400, seed=seed),
    )  # fmt: skip


def a100_rows(runner: Runner, seeds: Sequence[int]) -> list[Row]:
    """Total tokens/s before and after, and the ratio, means over seeds."""
    keys = [
        (devices, limits, memory, seed)
        for devices in A100_TOKENS_PER_S
        for memory in (MEMORY_OF_TODAY, SAMPLER_OF_2025)
        for limits in (BEFORE, BUDGET_ALONE, AFTER)
        for seed in seeds
    ]
    found = runner.metrics({key: a100(*key) for key in keys})

    def rate(devices: int, limits: tuple[int, int], memory: str) -> float:
        runs = [found[devices, limits, memory, seed] for seed in seeds]
        return fmean((one["prompt_tokens"] + one["output_tokens"]) / one["run_duration_s"] for one in runs)

    rows = []
    for devices, (before, after) in A100_TOKENS_PER_S.items():
        for memory in (MEMORY_OF_TODAY, SAMPLER_OF_2025):
            name, why = f"vllm#17885, TP {devices}, {memory}", _A100_WHY[devices, memory]
            first, alone, last = (rate(devices, limits, memory) for limits in (BEFORE, BUDGET_ALONE, AFTER))
            rows += [
                Row(name=f"{name}: before, tokens/s", published=before, simulated=first, held=False),
                Row(name=f"{name}: before, with 256 seats, tokens/s", published=before, simulated=alone, held=False),
                Row(name=f"{name}: after, tokens/s", published=after, simulated=last, held=False),
                Row(name=f"{name}: after over before", published=after / before, simulated=last / first, why=why),
            ]
    return rows


# vllm#52906

GB10 = "memory=121.7,bandwidth=273,flops=125,link=25"
"""DGX Spark's data sheet: 273 GB/s, 1 PFLOP/s in FP4 with sparsity, an eighth of which is dense 16-bit; the link is
not used."""
_ATTENTION = 2048 * 256 * (2 * 16 + 2 * 2) + 16 * 256 * 2048
"""Parameters of an attention layer: gated queries, keys, values, output."""
_DELTA_NET = 2048 * (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32) + 32 * 128 * 2048
"""Of a gated delta net: queries, keys, values, gate, two numbers for each head, output."""
_HELD = 2048 * 128 * (2 * 8 + 2 * 1)
_REST = round(((_ATTENTION + 3 * _DELTA_NET) / 4 - _HELD) / (3 * 2048))
QWEN = ModelShape(
    name="qwen3.6-35b-a3b", layers=40, hidden=2048, heads=8, kv_heads=1, head_dim=128, ffn=512, gated=True,
    vocab=248_320, tied_embeddings=False, max_positions=262_144,
    experts=Experts(layers=40, routed=256, per_token=8, ffn=512, shared_ffn=512 + _REST),
    weight_bytes_per_parameter=1.0,
    source="transformers' Qwen3_5MoeTextConfig, whose defaults are those of Qwen3.5-35B-A3B",
)  # fmt: skip
"""A shape of equal work. Attention is in 10 of 40 layers, 16 heads and 2 KV heads of 256: a quarter of its pairs and of
its KV is that of 8 heads and 1 of 128 in every layer. What these lack of the parameters stands with the shared
expert's."""
BY_DATA_SHEET, ONE_CONSTANT = "by the data sheet", "one constant"
GEMM_EFFICIENCY: dict[str, float | None] = {BY_DATA_SHEET: None, ONE_CONSTANT: 0.215}
"""The constant is set by the prefill rate without a cap."""
UNCAPPED = 2048
ALONE_MS = 37.6
CAPPED = {2048: (438.0, 14.8, 27.1), 1024: (282.0, 11.4, 34.4), 512: (232.0, 7.0, 54.9), 256: (179.0, 4.8, 80.0)}
"""Cap, of which the first is none -> published ms per output token with 4 decoding clients, prompts per minute, median
TTFT in seconds with 16."""
_WARM_S = 60.0
_GB10_WHY = {
    BY_DATA_SHEET: "prefill runs at a fifth of the peak there, and is assumed at 0.7",
    ONE_CONSTANT: "a step of decodes alone is too short: no state of the delta nets, no output layer in 16 bits",
}


@dataclass
class Clients:
    """Requests that are given one by one; until a time, each client sends its request again when it ends."""

    name: str
    requests: Sequence[SimRequest]
    until_s: float = 0.0

    def __post_init__(self) -> None:
        told = [(one.arrival_s, one.prompt_tokens, one.output_tokens) for one in self.requests]
        self.rows, self.sha256 = len(told), hashlib.sha256(repr(told).encode()).hexdigest()

    def start(self) -> Iterator[SimRequest]:
        """Yield the first requests."""
        return iter(self.requests)

    def after(self, request: SimRequest, finished_s: float, output_ids: Sequence[int]) -> Iterable[SimRequest]:
        """Return the same again."""
        again = replace(request, req_id=f"{request.req_id}+", arrival_s=finished_s)
        return [again] if finished_s < self.until_s else []


def mixed_clients(decoding: int, prompting: int, until_s: float) -> Clients:
    """Return clients of 128 tokens in and 512 out, and clients of 16,384 in and one out."""
    kinds = [("decode", 128, 512)] * decoding + [("prefill", 16_384, 1)] * prompting
    return Clients(
        f"{decoding} decoding and {prompting} prefilling clients",
        [
            SimRequest(req_id=f"{kind}{number}", arrival_s=0.0, prompt_tokens=prompt, output_tokens=output,
                       max_tokens=output, tier=kind)
            for number, (kind, prompt, output) in enumerate(kinds)
        ],
        until_s,
    )  # fmt: skip


@cache
def gb10(cap: int, decoding: int, constant: str, until_s: float, prompting: int = 8) -> tuple[float, float, float]:
    """Return ms per output token and median TTFT in seconds of decoding clients, and prompts per minute between."""
    cost = costs.build(
        Hardware(HardwareSpec(device=GB10), QWEN, find_device(GB10)),
        CostSpec(gemm_efficiency=GEMM_EFFICIENCY[constant]),
    )
    engine = EngineSpec(
        system=FCFS, max_num_batched_tokens=UNCAPPED if cap == UNCAPPED else cap + decoding, max_num_seqs=256,
        max_model_len=32_768, num_blocks=20_000, prefix_caching=False,
    )  # fmt: skip
    workload = mixed_clients(decoding, prompting, until_s)
    table = simulate(SimulationSpec(engine=engine), workload=workload, cost=cost).requests
    first, finish, ttft, outputs = map(table.column, ("first_token_s", "finish_s", "ttft_s", "output_tokens"))
    within = finish <= until_s  # later the prompts run dry
    decodes, prompts = table.column("tier") == "decode", table.column("tier") == "prefill"
    later = decodes & within & (table.column("arrival_s") > 0)  # the first ones found no prompt before them
    tpot_s = ((finish - first) / np.maximum(outputs - 1, 1))[decodes & within].mean()
    per_minute = (prompts & within & (finish > _WARM_S)).sum() / (until_s - _WARM_S) * 60
    return 1e3 * float(tpot_s), float(per_minute), float(np.median(ttft[later])) if later.any() else math.nan


def gb10_rows(until_s: float, constants: Sequence[str] = (BY_DATA_SHEET, ONE_CONSTANT)) -> list[Row]:
    """What a cap does to decoding clients, to the prefill rate and to the TTFT, each over what it is without."""
    rows = []
    for constant in constants:
        name, why = f"vllm#52906, {constant}", _GB10_WHY[constant]
        alone_ms = gb10(UNCAPPED, 4, constant, until_s, prompting=0)[0]
        found = {}
        for cap in CAPPED:
            tpot_ms, per_minute, _ = gb10(cap, 4, constant, until_s)
            found[cap] = (tpot_ms, per_minute, gb10(cap, 16, constant, until_s)[2])
        rows.append(Row(name=f"{name}: decode alone, ms", published=ALONE_MS, simulated=alone_ms, held=False))
        for cap, published in CAPPED.items():
            at = f"{name}: cap {cap if cap != UNCAPPED else 'off'}"
            rows += [
                Row(name=f"{at}, {what}", published=one, simulated=ours, held=False)
                for what, one, ours in zip(("TPOT, ms", "prefill, prompts/min", "TTFT, s"),
                                                 published, found[cap], strict=True)
            ]  # fmt: skip
            rows.append(Row(name=f"{at}, TPOT over decode alone", published=published[0] / ALONE_MS,
                            simulated=found[cap][0] / alone_ms, why=why))  # fmt: skip
            if cap != UNCAPPED:
                rows += [
                    Row(name=f"{at}, {what} over off", published=one / off, simulated=ours / base, why=why)
                    for what, one, off, ours, base in zip(("TPOT", "prefill rate", "TTFT"), published, CAPPED[UNCAPPED],
                                                          found[cap], found[UNCAPPED], strict=True)
                ]  # fmt: skip
    return rows


# inference-sim#339

FORMULA = Fitted(StepCurve(base_s=6910.42e-6, per_chunk_token=17.67e-6, per_decode=2.84e-6))
"""Step time of Llama-3.1-8B on two H100, from its defaults; post-processing of a token, 1 % of the latency, is left."""
E2E_S = {(2048, FCFS): 33.078, (2048, PRIORITY): 22.819, (65_536, FCFS): 112.177, (65_536, PRIORITY): 112.211}
"""Token budget and order -> published mean end-to-end latency."""
AS_STATED, DEFAULT_LENGTHS = "lengths as stated", "default lengths"
_OTHER_RUN = "8 seats never ask for more than 4,096 tokens: by its formula the budget changes nothing"


def one_server(lengths: str, shortest_first: bool, seed: int, requests: int = 500, rate_per_s: float = 70.0) -> Clients:
    """Return one server's requests: half of 32 in and 64 out, half of 512 and 256; or, by default, normal lengths."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate_per_s, requests))
    if lengths == AS_STATED:
        pairs = [((32, 64), (512, 256))[kind] for kind in rng.integers(2, size=requests)]
    else:
        drawn = np.clip(np.rint(rng.normal(512, 256, (requests, 2))), 2, 7000).astype(int)
        pairs = [(int(prompt), int(output)) for prompt, output in drawn]
    return Clients(
        f"inference-sim, {lengths}",
        [
            SimRequest(req_id=f"r{at}", arrival_s=float(time), prompt_tokens=prompt, output_tokens=output,
                       max_tokens=output, priority=prompt if shortest_first else 0)
            for at, (time, (prompt, output)) in enumerate(zip(times, pairs, strict=True))
        ],
    )  # fmt: skip


def e2e_s(lengths: str, budget: int, system: str, seed: int) -> float:
    """Return the mean end-to-end latency of a run of inference-sim#339."""
    engine = EngineSpec(
        system=system, max_num_batched_tokens=budget, max_num_seqs=8, max_model_len=16_384, num_blocks=20_000,
        prefix_caching=False, async_scheduling=False,
    )  # fmt: skip
    workload = one_server(lengths, system == PRIORITY, seed)
    return summarise(simulate(SimulationSpec(engine=engine), workload=workload, cost=FORMULA))["e2e_mean_ms"] / 1e3


def liveness_rows(seeds: Sequence[int]) -> list[Row]:
    """Latency by budget and order, and what shortest job first brings at each budget."""

    def mean(lengths: str, budget: int, system: str) -> float:
        return fmean(e2e_s(lengths, budget, system, seed) for seed in seeds)

    found = {key: mean(AS_STATED, *key) for key in E2E_S}
    other = {key: mean(DEFAULT_LENGTHS, *key) for key in E2E_S if key[0] != 2048}
    rows = []
    for lengths, ours in ((AS_STATED, found), (DEFAULT_LENGTHS, {**found, **other})):
        name, why = f"inference-sim#339, {lengths}", _OTHER_RUN if lengths == AS_STATED else ""
        for budget in (2048, 65_536) if lengths == AS_STATED else (65_536,):
            fcfs, shortest = (budget, FCFS), (budget, PRIORITY)
            rows += [
                Row(name=f"{name}: {budget} tokens, FCFS, s", published=E2E_S[fcfs], simulated=ours[fcfs], held=False),
                Row(name=f"{name}: {budget} tokens, SJF over FCFS", published=E2E_S[shortest] / E2E_S[fcfs],
                    simulated=ours[shortest] / ours[fcfs], why=why),
            ]  # fmt: skip
        large, small = (65_536, FCFS), (2048, FCFS)
        rows.append(Row(name=f"{name}: FCFS, 65536 tokens over 2048", published=E2E_S[large] / E2E_S[small],
                        simulated=ours[large] / ours[small], why=why))  # fmt: skip
    return rows


def run(runner: Runner) -> Findings:
    """Simulate what was measured."""
    seeds = runner.seeds(3)
    rows = [*a100_rows(runner, seeds), *gb10_rows(700.0 if runner.quick else 1200.0), *liveness_rows(seeds)]
    listed = [
        mixed_clients(4, 8, 0.0),
        *(one_server(lengths, False, seed) for lengths in (AS_STATED, DEFAULT_LENGTHS) for seed in seeds),
    ]
    shown: list[list[object]] = [
        [row.name, f"{row.published:.4g}", f"{row.simulated:.4g}", f"{row.over:.3f}"] for row in rows
    ]
    return Findings(
        tables=[Table(["", "published", "simulated", "simulated over published"], shown)],
        claims=[*claims(rows)],
        metrics={f"simulated.{row.name}": row.simulated for row in rows},
        baselines={"published": {row.name: row.published for row in rows}},
        config={"seeds": seeds, "gemm_efficiency": GEMM_EFFICIENCY[ONE_CONSTANT]},
        workload=[
            *(a100(2, BEFORE, MEMORY_OF_TODAY, seed).workload for seed in seeds),
            *(Workload(name=one.name, rows=one.rows, sha256=one.sha256) for one in listed),
        ],
    )


EXPERIMENT = Experiment(
    id="public_measurements", title="Does the cost model reproduce what others measured of the token budget?", run=run
)

if __name__ == "__main__":
    simulated.main(EXPERIMENT, sys.argv[1:])
