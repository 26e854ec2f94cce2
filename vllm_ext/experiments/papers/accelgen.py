"""AccelGen: models and hardware, the mixed workload with its objectives, and the systems that are compared."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_ext.experiments.experiment import Paper, Variant
from vllm_ext.simulation.cost.devices import find_device
from vllm_ext.simulation.cost.roofline import pivot_tokens
from vllm_ext.simulation.cost.spec import CostSpec, HardwareSpec
from vllm_ext.simulation.cost.spec import build as build_cost
from vllm_ext.simulation.cost.step_shape import CostModel, StepShape
from vllm_ext.simulation.spec import RecordSpec, SimulationSpec
from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.spec import MixPart, SloTarget, TierSpec, WorkloadSpec
from vllm_ext.systems import resolve

DIFFERENCES = (
    "Hardware is a roofline of A100-80GB devices; rates are those of the cost model, ratios are what is compared. "
    "OPT-175B runs on 8 devices with tensor parallelism (the paper: pipeline 8, tensor 2, which is 16).",
    "All systems run on today's engine loop (async scheduling) and kernels and differ in scheduling only; blocks have "
    "32 tokens. The paper's systems were slower in other ways too: 16-34 % of their batches ended within 0.1875 s.",
    "12 GB hold 14,592 tokens of OPT-13B's or Llama-13B's KV, 33.75 GB per device 57,184 of OPT-175B's: no book of "
    "100K fits, and the paper does not say what it did. Prompts are cut to what fits beside their answer. Positions "
    "beyond the models' own exist in the simulation only.",
    "The data sets are log-normal lengths with published means or quantiles, BookCorpus by the paper's figure 8a; "
    "Alpaca and ShareGPT are drawn in proportion to their sizes.",
    "The paper serves 20K requests at 8/s, 42 minutes of arrivals into an overload of several times the capacity "
    "(config.utilisation: least compute and KV memory over what there is), and does not say when it stopped. Here a "
    "window of minutes is measured, the same for all systems; whoever is not served by its end has missed.",
    "TTFT objectives come from the simulated prefill of the bucket, alone, in one step, times U[0.5, 1.5]: tens of "
    "milliseconds for short prompts (config.first_bucket_ttft_ms). Many cannot be met even by an idle server, and "
    "fewer where steps of 20 to 140 ms are under way. The paper's came from Triton with FasterTransformer, whose "
    "latencies it does not give.",
    "Attainment is of iterations, as in the paper: tokens that came in time over tokens that came. Objectives of whole "
    "requests stand beside it. The paper says neither who has JCT objectives nor which they are; completeness by TTFT "
    "objective + tokens x TBT objective stands for them.",
    "Goodput is the tokens per second that came in time; the paper does not define its own beyond T = 1 s.",
    "The time that scheduling takes (figures 11f and 12f) is wall-clock time, which no simulation keeps.",
    "Orca reserves each client's own bound (prompt + 2048), not 8K: of those the KV of 12 GB would hold one. FastServe "
    "has paged KV and drops it where the original swaps; Sarathi-Serve's and FastGen's budgets are S_pf, as in the "
    "paper.",
    "AccelGen is the row accelgen-published: no aging, nobody relegated, equation 6 alone; `accelgen, ours` is beside "
    "it. A request is urgent while it can still meet its objective, since urgent ones must run *to satisfy their SLOs* "
    "(4.3), and a prompt starts when there is KV for all of it; the rows `who has lost stays urgent` and `prompts "
    "start in what KV is left` read the paper otherwise. `who has lost goes last` is not in the paper: one switch, "
    "`ordering.relegate`, whose figure stands beside each of AccelGen's. FastServe runs without its starvation limit "
    "of 30 s, with which it is slower here.",
    "`shortest prompt first` is not among the paper's baselines: vLLM 0.32, tuned, with its queue by prompt length "
    "(`alise` without predictions, without waiting that counts).",
    "The Oracle is AccelGen with true output lengths, which matter to JCT objectives only, and nobody has one: it "
    "decides as AccelGen does. The paper's searches schedules on a simulator.",
)
PAPER = Paper("AccelGen (arXiv 2503.13737)", "accelgen-published", DIFFERENCES)

BLOCK_TOKENS = 32
"""Block size. Source: section 3.1."""
MAX_OUTPUT_TOKENS = 2048
"""Source: section 3.1."""
LONGEST_TOKENS = 102_400
"""Context where memory does not bound it: books of 100K tokens, and an answer."""
BUCKET_TOKENS = 512
READING_TBT_S = 0.1875
TIGHTEST_TBT_S = 0.75 * READING_TBT_S
"""Source: section 6.1."""
RATE_PER_S = 8.0
BOOKS_SHARE = 0.35
SHORT_SOURCES = {"alpaca": ("alpaca-vllm", 52_000), "sharegpt": ("sharegpt-vllm", 90_000)}
"""Tier -> preset, and how many requests the paper's data set has."""
BOOKS = "books"
LONGER = "steps {:g} times as long"
_NEVER_S = 1e6


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A model on its hardware."""

    name: str
    model: str
    kv_bytes: int
    """KV memory of each device, in bytes."""
    tensor_parallel: int = 1

    @property
    def hardware(self) -> HardwareSpec:
        """The devices, with the KV memory that the paper states."""
        return HardwareSpec(
            model=self.model,
            device="a100-80",
            tensor_parallel=self.tensor_parallel,
            kv_memory_bytes=self.kv_bytes,
        )

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds; vLLM keeps one block for itself."""
        # What a step needs does not matter where the KV memory is given.
        blocks = self.hardware.resolve().num_kv_blocks(BLOCK_TOKENS, max_num_batched_tokens=0, max_num_seqs=0)
        return (blocks - 1) * BLOCK_TOKENS

    @property
    def context_tokens(self) -> int:
        """Longest prompt and output together: what the KV cache holds, or the longest book."""
        return min(self.kv_tokens, LONGEST_TOKENS)

    @property
    def cost(self) -> CostModel:
        """How long steps take."""
        return build_cost(self.hardware.resolve(), CostSpec())

    @property
    def pivot_tokens(self) -> int:
        """S_pf of the simulated hardware; the paper measured 768 for OPT-13B and 1280 for OPT-175B on its own."""
        return pivot_tokens(self.cost)

    @property
    def tightest_tokens(self) -> int:
        """The largest step, in whole tiles of 128, that keeps the tightest TBT objective with short contexts."""
        pivot = self.pivot_tokens
        return max(128, int(pivot * TIGHTEST_TBT_S / prompt_s(self.cost, pivot)) // 128 * 128)


OPT_13B = Panel(name="OPT-13B", model="opt-13b", kv_bytes=12 * 10**9)
LLAMA_13B = Panel(name="Llama-13B", model="llama-13b", kv_bytes=12 * 10**9)
OPT_175B = Panel(name="OPT-175B", model="opt-175b", kv_bytes=33_750_000_000, tensor_parallel=8)
LLAMA_70B = Panel(name="Llama-3-70B", model="llama-3.1-70b", kv_bytes=135 * 10**9 // 4, tensor_parallel=4)
PANELS = (OPT_13B, OPT_175B, LLAMA_13B, LLAMA_70B)


@dataclass(frozen=True, kw_only=True)
class Load:
    """Who arrives, and for how long."""

    arrivals_s: float
    drain_s: float
    """From the last arrivals to the end of the window."""
    rate_per_s: float = RATE_PER_S
    books: float = BOOKS_SHARE
    """Share of the requests that bring a book."""

    @property
    def window_s(self) -> float:
        """What is measured."""
        return self.arrivals_s + self.drain_s


_PUBLISHED = resolve(PAPER.row).parameters


def _published(name: str, system: str, *, lacks: str = "", **changed: Mapping[str, Any]) -> Variant:
    """A variant of AccelGen with all else as published; ``lacks`` is an axis whose policy is another one there."""
    given = {axis: {**values, **changed.get(axis, {})} for axis, values in _PUBLISHED.items() if axis != lacks}
    return Variant(name=name, system=system, options=given)


ACCELGEN = Variant(name="AccelGen", system=PAPER.row)
OURS = Variant(name="accelgen, ours", system="accelgen")
OURS_UNAGED = Variant(
    name="accelgen, ours, never aged", system="accelgen", options={"ordering": {"age_limit_s": _NEVER_S}}
)
"""Without the age limit of 120 s, which costs output for an end to waiting."""
OURS_OLDEST_FIRST = Variant(
    name="accelgen, ours, oldest first", system="accelgen", options={"ordering": {"aged_share": 1.0}}
)
"""Who has waited 120 s goes before all others, not in one admission of ten."""
ORACLE = _published("Oracle", "oracle-accelgen")
UPSTREAM = Variant(name="vLLM 0.32 fcfs", system="upstream-fcfs")
ABLATIONS = (
    _published("without Chunk", "accelgen-no-chunk", lacks="budget"),
    _published("without Order", "accelgen-no-order", lacks="ordering", admission={"ordered": False}),
    _published("without Batch", "accelgen-no-batch", admission={"match": False}),
)
"""The paper's /Chunk, /Order and /Batch."""
READINGS = (
    _published("who has lost stays urgent", PAPER.row, admission={"lost_urgent": True}),
    _published("prompts start in what KV is left", PAPER.row, budget={"within_kv": True}),
    _published("both", PAPER.row, admission={"lost_urgent": True}, budget={"within_kv": True}),
    _published("ERA ends when the prompt is computed", PAPER.row, admission={"exclusive_to_end": False}),
)
"""Other readings of sections 4.2 to 4.4."""
RELEGATED = _published("who has lost goes last", PAPER.row, ordering={"relegate": True})
"""One rule of ours."""


def baselines(panel: Panel) -> tuple[Variant, ...]:
    """Return the paper's baselines."""
    return (
        Variant(name="Orca", system="orca", engine={"max_num_seqs": 8}),
        Variant(name="vLLM-2023", system="vllm-2023"),
        Variant(name="FastGen", system="fastgen"),
        Variant(name="Sarathi-Serve", system="sarathi-published", options={"budget": {"tokens": panel.pivot_tokens}}),
        # Its limit of 30 s makes it first come, first served in these overloads, and it does worse.
        Variant(name="FastServe", system="fastserve", options={"ordering": {"starve_limit_s": _NEVER_S}}),
    )


def tuned(panel: Panel) -> Variant:
    """Return vLLM of today with the largest steps that keep the tightest objective."""
    engine = {"max_num_batched_tokens": panel.tightest_tokens, "watermark": 0.05}
    return Variant(name="vLLM 0.32 fcfs, tuned", system="upstream-fcfs", engine=engine)


def shortest_prompt_first(panel: Panel) -> Variant:
    """Return `tuned` by prompt length, near ones by arrival: a cost without predictions grows with the prompt alone."""
    return Variant(
        name="shortest prompt first",
        system="alise",
        engine={"max_num_batched_tokens": panel.tightest_tokens},
        options={
            "prediction": {"sources": ()},
            "ordering": {"theta": 0.0, "gamma": 1e-6, "age_limit_s": _NEVER_S},
            "admission": {"kv_reserve": 0.05, "max_passed": 0},  # in order, as vLLM with its watermark of 5 %
        },
    )


def slower(variant: Variant, panel: Panel, factor: float) -> Variant:
    """Return a variant on devices whose every rate is divided by ``factor``."""
    device = find_device(panel.hardware.device)
    rates = ("gemm_efficiency", "attention_efficiency", "memory_efficiency", "weight_efficiency", "link_efficiency")
    return replace(
        variant,
        name=f"{variant.name}, {LONGER.format(factor)}",
        cost={name: getattr(device, name) / factor for name in rates},
    )


def prompt_s(cost: CostModel, tokens: int) -> float:
    """Return the time to compute a whole prompt alone, in one step, in seconds; the host's included."""
    shape = StepShape(1, tokens, 0, 1, 0, tokens, tokens * (tokens + 1) / 2)
    return cost.device_s(shape) + cost.host_s(shape)


@functools.cache
def ttft_buckets(panel: Panel) -> tuple[float, ...]:
    """Return the mean prefill latency of prompts of up to 512 tokens, up to 1024, ..., in seconds.

    Lengths are spread evenly over a bucket: most prompts of the first one are far shorter, and would make the
    objective of all of it tighter.
    """
    cost = panel.cost
    starts = range(0, panel.context_tokens, BUCKET_TOKENS)
    offsets = range(32, BUCKET_TOKENS + 1, 32)
    return tuple(statistics.fmean(prompt_s(cost, start + offset) for offset in offsets) for start in starts)


def workload_spec(panel: Panel, load: Load, seed: int) -> WorkloadSpec:
    """Return the mix, each data set a tier of its own, with the paper's objectives; clients announce theirs."""
    ttft = SloTarget(bucket_tokens=BUCKET_TOKENS, bucket_s=ttft_buckets(panel), low=0.5, high=1.5)
    tbt = SloTarget(base_s=READING_TBT_S, low=0.75, high=1.25)
    rows = sum(count for _, count in SHORT_SOURCES.values())
    mix = [
        MixPart(source=source, weight=(1 - load.books) * count / rows, tier=tier)
        for tier, (source, count) in SHORT_SOURCES.items()
        if load.books < 1
    ]
    if load.books > 0:
        mix.append(MixPart(source="bookcorpus-like", weight=load.books, tier=BOOKS))
    return WorkloadSpec(
        mix=tuple(mix),
        tiers=tuple(TierSpec(name=name, ttft=ttft, tbt=tbt) for name in (*SHORT_SOURCES, BOOKS)),
        announce_slo=True,
        arrivals="poisson",
        rate_per_s=load.rate_per_s,
        duration_s=load.arrivals_s,
        max_tokens=MAX_OUTPUT_TOKENS,
        max_model_len=panel.context_tokens,
        over_context="cut",
        seed=seed,
    )


def spec(variant: Variant, panel: Panel, load: Load, seed: int) -> SimulationSpec:
    """Return one run."""
    engine = {
        "max_model_len": panel.context_tokens,
        "block_size": BLOCK_TOKENS,
        "prefix_caching": False,
        "profiled": True,
    }
    return variant.spec(
        engine=engine,
        hardware=panel.hardware,
        workload=dict(workload_spec(panel, load, seed)),
        record=RecordSpec(token_times=True),
        max_time_s=load.window_s,
    )


def utilisation(panel: Panel, load: Load, seed: int) -> dict[str, float]:
    """Return the least share of compute and of KV memory that serving everybody takes; above 1 nobody can.

    Compute is prompts at the throughput of S_pf, and no decode; memory is KV held while answers are generated at the
    pace of a lone decode, over the KV cache.
    """
    cost, pivot = panel.cost, panel.pivot_tokens
    step_s = cost.device_s(StepShape(1, 1, 1, 1, 1, 0, 0.0))
    requests = list(build(workload_spec(panel, replace(load, arrivals_s=max(load.arrivals_s, 600.0)), seed)).start())
    tokens = statistics.fmean(r.prompt_tokens for r in requests)
    held = statistics.fmean((r.prompt_tokens + r.output_tokens / 2) * r.output_tokens * step_s for r in requests)
    return {
        "compute": load.rate_per_s * tokens * prompt_s(cost, pivot) / pivot,
        "memory": load.rate_per_s * held / panel.kv_tokens,
    }
