"""Pensieve: conversations keep their KV in GPU and host memory.

All experiments but Figure 3.14 have one method: conversations with a minute between turns begin at a Poisson rate; for
each system the rate is searched at which the P90 normalised latency reaches a limit. Stateless serving is the paper's
baseline; GPU cache alone, and what vLLM 0.32 can do, are beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_ext.experiments.experiment import Paper, Variant
from vllm_ext.simulation.cost.spec import HardwareSpec
from vllm_ext.simulation.spec import KvOffloadSpec, SimulationSpec

DIFFERENCES = (
    "Hardware is a roofline of A100-80GB GPUs: rates are those of the cost model, ratios are what is compared. Of each "
    "KV takes 40 GB, and host memory is 220 GB per GPU, as in the paper.",
    "Conversations have the paper's means of turns and lengths (table 3.2) and its share with 5 turns or more, but are "
    "drawn, not ShareGPT's own.",
    "The paper names no latency at which throughput is compared; here it is about five times that of an idle server. A "
    "table has the ratio at 2 to 10 times.",
    "The stateless baseline of the paper is vLLM 0.2, whose schedule (steps of prompts before steps of decodes) runs "
    "here in today's engine loop. vLLM 0.32, with prefix caching and with host memory too, is beside it; the paper did "
    "not have it.",
    "Pensieve runs in vLLM's engine loop: blocks of 32 tokens, the paper's chunks, prompts in pieces of at most 2048 "
    "tokens, async scheduling. It is the row pensieve-published: stores and loads always, eviction by equation 3.4. "
    "`Pensieve, returns by turns` has the probability of a return as well, as the paper's text; `pensieve, ours` is "
    "beside both.",
    "Rates count turns. Conversations begin for 30 minutes; the paper states no duration. A run begins with an empty "
    "server and caches, and that is part of its P90.",
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
    "opt-13b": Model(gpus=1, limit_ms=100.0, start_per_s=2.7),
    "llama-2-13b-gqa10": Model(gpus=1, limit_ms=80.0, start_per_s=4.3),
    "opt-66b": Model(gpus=4, limit_ms=130.0, start_per_s=2.6),
    "llama-2-70b": Model(gpus=4, limit_ms=135.0, start_per_s=3.4),
}
DURATION_S, QUICK_S = 1800.0, 400.0
"""Conversations begin for so long. Load and what is kept of histories grow for longer than 15 minutes: by runs of that
length stateless serving of OPT-13B keeps its limit up to 4.9 turns/s, by runs of this one up to 2.8."""
KV_BYTES_PER_GPU = 40_000_000_000
HOST_BYTES_PER_GPU = 220_000_000_000


def tiered(name: str, system: str = PAPER.row, start: float = 1.3, **tier: Any) -> Variant:
    """A system with our host tier, whose size `spec` sets."""
    return Variant(name=name, system=system, options={"kv_tier": tier}, start=start)


VLLM_2023 = Variant(name="vLLM 0.2, stateless", system="vllm-2023", engine={"prefix_caching": False})
STATELESS = Variant(name="vLLM 0.32, stateless", system="upstream-fcfs", engine={"prefix_caching": False})
PREFIX = Variant(name="vLLM 0.32, prefix caching", system="upstream-fcfs")
LRU = Variant(
    name="prefix caching + host LRU",
    system="upstream-fcfs",
    engine={"kv_offload": KvOffloadSpec(cpu_bytes=HOST_BYTES_PER_GPU, policy="lru")},
    start=1.3,
)
"""Upstream with its own host tier, whose size `spec` sets."""
GPU_ONLY = Variant(name="Pensieve, GPU cache", system=PAPER.row, start=1.1)
PENSIEVE = tiered("Pensieve")
BY_TURNS = tiered("Pensieve, returns by turns", f"{PAPER.row}-turns")
"""With the probability of a return in the value, as the paper's text has it and its equation has not."""
OURS = tiered("pensieve, ours", "pensieve")
OURS_8 = tiered("pensieve, ours, 8 bits", "pensieve", 1.4, bits=8)
SEPARATE = tiered("Pensieve, separate steps", f"vllm-2023+{PAPER.row}", 1.2)
SHOWN = (VLLM_2023, STATELESS, LRU, PENSIEVE, OURS)
TUNED = LRU
"""vLLM 0.32 for conversations, which ours is held against: with ARC it carried the same, without host memory less."""
JUDGED = (VLLM_2023, TUNED, PENSIEVE, OURS)
"""Whom claims compare."""


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
