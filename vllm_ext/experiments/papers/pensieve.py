"""Pensieve: conversations keep their KV in GPU and host memory.

All experiments but Figure 3.14 have one method: conversations with a minute between turns begin at a Poisson rate; for
each system the rate is searched at which the P90 normalised latency reaches a limit. Stateless serving is the paper's
baseline; GPU cache alone, and what vLLM 0.32 can do, are beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from vllm_ext.experiments.experiment import Findings, Paper, Plot, Variant, flat, line_plot
from vllm_ext.experiments.runner import Runner, Sustained
from vllm_ext.report.claim import Claim
from vllm_ext.report.table import Table
from vllm_ext.simulation.cost.spec import HardwareSpec
from vllm_ext.simulation.spec import KvOffloadSpec, SimulationSpec

DIFFERENCES = (
    "Hardware is a roofline of A100-80GB GPUs: rates are those of the cost model, ratios are what is compared. Of each "
    "KV takes 40 GB, and host memory is 220 GB per GPU, as in the paper.",
    "Conversations have the paper's means of turns and lengths (table 3.2) and its share with 5 turns or more, but are "
    "drawn, not ShareGPT's own.",
    "The paper names no latency at which throughput is compared; here it is about five times that of an idle server.",
    "The stateless baseline of the paper is vLLM 0.2, whose schedule (steps of prompts before steps of decodes) runs "
    "here in today's engine loop. vLLM 0.32, with prefix caching and with host memory too, is beside it; the paper did "
    "not have it.",
    "Pensieve runs in vLLM's engine loop: blocks of 32 tokens, the paper's chunks, prompts in pieces of at most 2048 "
    "tokens, async scheduling. It is the row pensieve-published: stores and loads always, eviction by equation 3.4. "
    "`Pensieve, returns by turns` has the probability of a return as well, as the paper's text; `pensieve, ours` is "
    "beside both.",
    "Rates count turns. A run begins with an empty server and caches, and that is part of its P90.",
)
PAPER = Paper("Pensieve (EuroSys '25)", "pensieve-published", DIFFERENCES)

P90 = "normalised_latency_p90_ms_per_token"
FOUND = "history_found_fraction"


@dataclass(frozen=True, kw_only=True)
class Model:
    """How a model is served."""

    gpus: int
    """Table 3.1."""
    limit_ms: float
    """P90 normalised latency at which rates are compared, per token: about five times that of an idle server. The paper
    compares where its curves turn up, and names no number."""
    start_per_s: float
    """First guess of the rate of stateless serving."""


MODELS = {
    "opt-13b": Model(gpus=1, limit_ms=100.0, start_per_s=4.0),
    "llama-2-13b-gqa10": Model(gpus=1, limit_ms=80.0, start_per_s=6.0),
    "opt-66b": Model(gpus=4, limit_ms=130.0, start_per_s=4.0),
    "llama-2-70b": Model(gpus=4, limit_ms=135.0, start_per_s=5.0),
}
DURATION_S, SEARCH_S, QUICK_S = 1800.0, 900.0, 400.0
"""Conversations begin for so long; with a minute between turns it takes some 400 s to come to full load. Where a rate
is searched, runs are shorter: it takes some eight for each system."""
LOW_LOADS = (0.25, 0.5, 0.75)
"""Of the rate that vLLM 0.2's schedule sustains: where it is seen from which load on something is gained."""
GAIN = 0.05
"""A lower P90 by at least so much counts as gained."""
KV_BYTES_PER_GPU = 40_000_000_000
HOST_BYTES_PER_GPU = 220_000_000_000


def tiered(name: str, system: str = PAPER.row, start: float = 1.3, **tier: Any) -> Variant:
    """A system with our host tier, whose size `spec` sets."""
    return Variant(name=name, system=system, options={"kv_tier": tier}, start=start)


def _upstream(name: str, policy: Literal["lru", "arc"]) -> Variant:
    """Upstream with its own host tier, whose size `spec` sets."""
    offload = KvOffloadSpec(cpu_bytes=HOST_BYTES_PER_GPU, policy=policy)
    return Variant(name=name, system="upstream-fcfs", engine={"kv_offload": offload}, start=1.3)


VLLM_2023 = Variant(name="vLLM 0.2, stateless", system="vllm-2023", engine={"prefix_caching": False})
STATELESS = Variant(name="vLLM 0.32, stateless", system="upstream-fcfs", engine={"prefix_caching": False})
PREFIX = Variant(name="vLLM 0.32, prefix caching", system="upstream-fcfs")
LRU = _upstream("prefix caching + host LRU", "lru")
ARC = _upstream("prefix caching + host ARC", "arc")
GPU_ONLY = Variant(name="Pensieve, GPU cache", system=PAPER.row, start=1.1)
PENSIEVE = tiered("Pensieve")
BY_TURNS = tiered("Pensieve, returns by turns", f"{PAPER.row}-turns")
"""With the probability of a return in the value, as the paper's text has it and its equation has not."""
OURS = tiered("pensieve, ours", "pensieve")
OURS_8 = tiered("pensieve, ours, 8 bits", "pensieve", 1.4, bits=8)
SEPARATE = tiered("Pensieve, separate steps", f"vllm-2023+{PAPER.row}", 1.2)
ALL = (VLLM_2023, STATELESS, PREFIX, LRU, ARC, GPU_ONLY, PENSIEVE, BY_TURNS, OURS, OURS_8)
MAIN = (VLLM_2023, STATELESS, PREFIX, LRU, GPU_ONLY, PENSIEVE, OURS)
QUICK = (VLLM_2023, STATELESS, LRU, PENSIEVE, OURS)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model and its users."""

    model: str
    min_turns: int = 1
    think_s: float = 60.0

    @property
    def name(self) -> str:
        """As it stands in tables."""
        turns = f", {self.min_turns} turns or more" if self.min_turns > 1 else ""
        return self.model + turns + (f", reaction {self.think_s:g} s" if self.think_s != 60.0 else "")


def spec(
    variant: Variant,
    setting: Setting,
    rate_per_s: float,
    *,
    duration_s: float,
    seed: int,
    host_share: float = 1.0,
) -> SimulationSpec:
    """Return one run: conversations begin for ``duration_s``, and all that began is served.

    Args:
        variant: Who serves.
        setting: Whom, with which model.
        rate_per_s: Of turns.
        duration_s: Nobody begins a conversation, or sends a turn, later.
        seed: Of all that is drawn.
        host_share: Of the paper's host memory.
    """
    gpus = MODELS[setting.model].gpus
    host_bytes = int(HOST_BYTES_PER_GPU * gpus * host_share)
    workload = {
        "source": "pensieve-sharegpt",
        "rate_per_s": rate_per_s,
        "rate_counts": "requests",
        "duration_s": duration_s,
        "think_s": setting.think_s,
        "min_turns": setting.min_turns,
        "seed": seed,
    }
    hardware = HardwareSpec(
        model=setting.model, device="a100-80", tensor_parallel=gpus, kv_memory_bytes=KV_BYTES_PER_GPU
    )
    made = variant.spec(engine={"max_model_len": 16_384, "block_size": 32}, hardware=hardware, workload=workload)
    sized: dict[str, Any] = {}
    if "kv_tier" in variant.options:
        sized["options"] = {"kv_tier": {"gib": host_bytes / 2**30, **variant.options["kv_tier"]}}
    if made.engine.kv_offload is not None:
        sized["kv_offload"] = made.engine.kv_offload.model_copy(update={"cpu_bytes": host_bytes})
    return made.model_copy(update={"engine": made.engine.model_copy(update=sized)})


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One setting: up to which rate each variant keeps the limit, and what its latency is at lower loads."""

    setting: Setting
    found: Mapping[str, Sustained]
    low: Mapping[tuple[float, str], float]
    """P90 by load and variant."""

    def ratio(self, one: Variant, other: Variant) -> float:
        """Return the rate of one variant over that of another."""
        return self.found[one.name].crossing_per_s / self.found[other.name].crossing_per_s

    def history_found(self, one: Variant) -> float:
        """Return the share of histories that was found, at the rate simulated next to where the limit is crossed."""
        found = self.found[one.name]
        return min(found.trials, key=lambda trial: abs(trial[0] - found.crossing_per_s))[1][FOUND]

    def claims(self, paper: float) -> Iterator[Claim]:
        """Yield Pensieve's gain over stateless serving beside the paper's, and what it gains over today's caches."""
        pensieve, base = ({load: self.low[load, c.name] for load in LOW_LOADS} for c in (PENSIEVE, VLLM_2023))
        gaining = (load for load in LOW_LOADS if pensieve[load] < (1 - GAIN) * base[load])
        load = next(gaining, None)
        seen = "at no load measured below it" if load is None else f"from {load:g} of its rate on"
        stateless = self.ratio(PENSIEVE, STATELESS)
        yield Claim(
            name=f"{self.setting.name}: throughput at equal P90 normalised latency, Pensieve / stateless",
            goal=paper,
            value=self.ratio(PENSIEVE, VLLM_2023),
            headline=True,
            facts=f"over vLLM 0.2's schedule; over vLLM 0.32's {stateless:.2f}. P90 is lower by {GAIN:.0%} {seen}",
        )
        for other in (LRU, ARC):
            if other.name in self.found:
                yield Claim(
                    name=f"{self.setting.name}: the same, Pensieve / {other.name} (not in the paper: better than 1)",
                    goal=1.0,
                    value=self.ratio(PENSIEVE, other),
                    facts="with as many bytes in the host",
                )

    def plot(self, variants: Sequence[Variant]) -> Plot:
        """Return latency over the rate, up to three times the limit."""
        ceiling = 3 * MODELS[self.setting.model].limit_ms
        edge = self.found[VLLM_2023.name].crossing_per_s
        return line_plot(
            "-" + self.setting.name.replace(", ", "-").replace(" ", "-"),
            {
                c.name: [
                    *((rate, one[P90]) for rate, one in self.found[c.name].trials if one[P90] <= ceiling),
                    *((load * edge, self.low[load, c.name]) for load in LOW_LOADS),
                ]
                for c in variants
            },
            xlabel="turns (1/s)",
            ylabel="P90 normalised latency (ms/token)",
            title=f"{self.setting.name}, simulated A100-80GB",
        )


def measure(runner: Runner, setting: Setting, variants: Sequence[Variant]) -> Measured:
    """Measure variants, `VLLM_2023` among them, in a setting."""
    model, start = MODELS[setting.model], {c.name: c.start for c in variants}

    def make(variant: Variant, rate_per_s: float) -> SimulationSpec:
        duration_s = QUICK_S if runner.quick else SEARCH_S
        return spec(variant, setting, rate_per_s, duration_s=duration_s, seed=runner.seed)

    found = runner.sustained(
        {c.name: partial(make, c) for c in variants},
        {P90: model.limit_ms},
        start_per_s=lambda name: start[name] * model.start_per_s,
        tolerance=0.15 if runner.quick else 0.08,
    )
    edge = found[VLLM_2023.name].crossing_per_s
    low = runner.metrics({(load, c.name): make(c, load * edge) for load in LOW_LOADS for c in variants})
    return Measured(setting=setting, found=found, low={key: metrics[P90] for key, metrics in low.items()})


def throughput(
    runner: Runner,
    gains: Mapping[Setting, float | None],
    variants: Sequence[Variant],
    also: Callable[[Measured], list[Claim]] = lambda _: [],
) -> Findings:
    """Measure throughput at equal latency in each setting.

    Args:
        runner: What runs simulations.
        gains: The paper's ratios over stateless serving, where it states one.
        variants: `VLLM_2023`, `STATELESS` and `PENSIEVE` among them.
        also: Returns what else a paper claims of a setting.
    """
    settings = [measure(runner, setting, variants) for setting in gains]
    claims = [claim for m in settings if (gain := gains[m.setting]) is not None for claim in m.claims(gain)]
    told = {
        (m.setting.name, c.name): {
            "requests_per_s": m.found[c.name].crossing_per_s,
            FOUND: m.history_found(c),
            **{f"load_{load:g}.{P90}": m.low[load, c.name] for load in LOW_LOADS},
        }
        for m in settings
        for c in variants
    }
    rows = []
    for m in settings:
        for c in variants:
            rate, found, *low = told[m.setting.name, c.name].values()
            rows.append((m.setting.name, c.name, rate, m.ratio(c, VLLM_2023), found, *low))
    lows = (f"P90 at {load:g}" for load in LOW_LOADS)
    return Findings(
        tables=[Table(("setting", "system", "requests/s", "/ stateless", "history found", *lows), rows)],
        claims=[*claims, *(claim for m in settings for claim in also(m))],
        **flat(told, "{}.".format, own={PENSIEVE.name: ""}),
        config=config(variants, QUICK_S if runner.quick else SEARCH_S),
        plots=[m.plot(variants) for m in settings],
        workload=[spec(VLLM_2023, OPT_13B, 1.0, duration_s=1.0, seed=0).workload],
    )


def config(variants: Sequence[Variant], duration_s: float) -> dict[str, Any]:
    """Return the settings that shaped a measurement."""
    return {
        "duration_s": duration_s,
        "limit_ms_per_token": {name: model.limit_ms for name, model in MODELS.items()},
        "kv_bytes_per_gpu": KV_BYTES_PER_GPU,
        "host_bytes_per_gpu": HOST_BYTES_PER_GPU,
        "variants": [c.name for c in variants],
    }


OPT_13B, LLAMA_13B = Setting(model="opt-13b"), Setting(model="llama-2-13b-gqa10")


@PAPER.figure("pensieve-fig12", "Figure 3.12", "Throughput at equal P90 normalised latency, 13B models on one GPU")
def fig12(runner: Runner) -> Findings:
    """How many more turns are served at the same latency if conversations keep their KV in GPU and host memory?"""
    return throughput(runner, {OPT_13B: 1.25, LLAMA_13B: 1.52}, QUICK if runner.quick else ALL)


@PAPER.figure("pensieve-fig13", "Figure 3.13", "Throughput at equal P90 normalised latency, large models on four GPUs")
def fig13(runner: Runner) -> Findings:
    """What becomes of the gain where models grow faster than their KV?"""
    gains = {Setting(model="opt-66b"): 1.5, Setting(model="llama-2-70b"): 1.6}
    return throughput(runner, gains, QUICK if runner.quick else MAIN)


@PAPER.figure(
    "pensieve-fig15", "Figure 3.15", "Throughput at equal P90 normalised latency, conversations of five turns or more"
)
def fig15(runner: Runner) -> Findings:
    """What becomes of the gain where more is said twice? Conversations with fewer than five turns are left out."""
    gains = {Setting(model=one.model, min_turns=5): gain for one, gain in ((OPT_13B, 1.3), (LLAMA_13B, 1.7))}
    return throughput(runner, gains, QUICK if runner.quick else MAIN)


@PAPER.figure("pensieve-fig16", "Figure 3.16", "Throughput at equal P90 normalised latency by the users' reaction time")
def fig16(runner: Runner) -> Findings:
    """What becomes of the gain where KV has to wait for longer? The paper states it for 60 and 120 seconds."""
    by_think_s = {30.0: None, 60.0: 1.52, 120.0: 1.4}
    gains = {Setting(model=LLAMA_13B.model, think_s=think_s): gain for think_s, gain in by_think_s.items()}
    return throughput(runner, gains, QUICK)


@PAPER.figure("pensieve-fig18", "Figure 3.18", "Unified batches against separate steps of prompts and decodes")
def fig18(runner: Runner) -> Findings:
    """What is unified batching worth to a server that computes only a few tokens of most prompts?

    Method: Pensieve as it is, and with the schedule of vLLM 0.2 instead, which has prompts go first, in steps without
    decodes. The paper shows the difference and states no number.
    """

    def also(measured: Measured) -> list[Claim]:
        low = {load: measured.low[load, SEPARATE.name] / measured.low[load, PENSIEVE.name] for load in LOW_LOADS}
        return [
            Claim(
                name="throughput at equal P90 normalised latency, unified / separate steps (no number in the paper)",
                goal=1.0,
                value=measured.ratio(PENSIEVE, SEPARATE),
                headline=True,
                facts="P90 of separate steps over that of unified ones at fractions of the stateless rate: "
                + ", ".join(f"{load:g}: {ratio:.2f}" for load, ratio in low.items()),
            )
        ]

    return throughput(runner, {LLAMA_13B: None}, (VLLM_2023, STATELESS, SEPARATE, PENSIEVE), also)
