"""The loads of systems_compared.py, what matters under each, and the systems that serve them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_ext.experiments.experiment import Variant
from vllm_ext.simulation.cost.spec import HardwareSpec
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.workloads.spec import MixPart, SloTarget, TierSpec

_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One number of a run."""

    name: str
    metric: str
    """As in `vllm_ext.simulation.measure.metrics`."""
    unit: str
    owner: str = ""
    """The single system whose own measure it is, which `auto` is held to; empty: shown, and held to nothing."""
    higher: bool = False
    """Whether more is better."""
    floor: float = 0.0
    """Added to both sides of a ratio, where values may be 0: how much does not matter."""


ATTAINMENT = Measure(
    name="met all objectives", metric="slo_attainment_fraction", unit="share", owner="accelgen", higher=True, floor=0.01
)
GOODPUT = Measure(
    name="goodput", metric="goodput_requests_per_s", unit="requests/s", owner="accelgen", higher=True, floor=0.01
)
NORMALISED = Measure(
    name="mean normalised latency",
    metric="normalised_latency_mean_ms_per_token",
    unit="ms/token",
    owner="alise",
    floor=1.0,
)
TBT_MET = Measure(
    name="every gap within 100 ms",
    metric="slo_tbt_attainment_fraction",
    unit="share",
    owner="sarathi",
    higher=True,
    floor=0.01,
)
P99_TBT = Measure(name="P99 TBT", metric="tbt_p99_ms", unit="ms")
TTFT = Measure(name="median TTFT", metric="ttft_p50_ms", unit="ms")
EVICTIONS = Measure(name="preemptions", metric="preemptions", unit="number", owner="past-future", floor=5.0)
STEPS = Measure(name="steps", metric="steps", unit="number", owner="past-future")
STREAM_TIME = Measure(name="duration", metric="run_duration_s", unit="s", owner="sarathi")


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A load, the hardware it meets, and what matters."""

    name: str
    description: str
    measures: tuple[Measure, ...]
    workload: Mapping[str, Any]
    """Fields of a `WorkloadSpec`."""
    quick: Mapping[str, Any]
    """Those of a quick run that differ."""
    hardware: HardwareSpec
    max_model_len: int
    options: Mapping[str, Any] = field(default_factory=dict)
    """Given to every system of ours."""

    def spec(self, system: str, seed: int, *, quick: bool) -> SimulationSpec:
        """Return the run of one system."""
        chosen = SYSTEMS[system]
        ours = not chosen.system.startswith("upstream")
        made = chosen.spec(
            engine={"max_model_len": self.max_model_len, "profiled": ours},
            hardware=self.hardware,
            workload={**self.workload, **(self.quick if quick else {}), "over_context": "cut", "seed": seed},
        )
        options = {**self.options, **chosen.options} if ours else {}
        return made.model_copy(update={"engine": made.engine.model_copy(update={"options": options})})


TUNED = "upstream, "
"""What the names of vLLM's settings begin with, of which each scene has its best."""
SYSTEMS = {
    one.name: one
    for one in (
        Variant(name="upstream", system="upstream-fcfs"),
        Variant(name=f"{TUNED}watermark", system="upstream-fcfs", engine={"watermark": 0.05}),
        *(
            Variant(
                name=f"{TUNED}{tokens} tokens",
                system="upstream-fcfs",
                engine={"watermark": 0.05, "max_num_batched_tokens": tokens, "max_num_seqs": min(tokens, 256)},
            )
            for tokens in (128, 256, 512, 1024)
        ),
        Variant(name="alise", system="alise"),
        *(
            Variant(name=name, system=name)
            for name in ("sarathi", "accelgen", "past-future", "fastgen", "fastserve", "auto")
        ),
    )
}
"""By the names in the tables."""

TIERS = (
    TierSpec(
        name="chat",
        share=0.6,
        ttft=SloTarget(base_s=1.0, per_prompt_token_s=0.0005, low=0.75, high=1.5),
        tbt=SloTarget(base_s=0.1, low=0.75, high=1.5),
    ),
    TierSpec(
        name="agent",
        share=0.2,
        ttft=SloTarget(base_s=5.0, low=0.75, high=1.5),
        tbt=SloTarget(base_s=0.2, low=0.75, high=1.5),
    ),
    TierSpec(name="batch", share=0.2, e2e=SloTarget(base_s=60.0, low=0.75, high=1.5)),
)
_LLAMA = HardwareSpec(model="llama-13b", device="a100-80", kv_memory_bytes=12 * _GIB)
_OPT = HardwareSpec(model="opt-13b", device="v100")
_HINTS = {"announce": "hint", "announce_error": 0.3}
_MIXED = {
    "mix": (
        MixPart(source="alpaca-vllm", weight=0.35),
        MixPart(source="sharegpt-vllm", weight=0.45),
        MixPart(source="arxiv-summarization", weight=0.2, cap_prompt_tokens=7000),
    ),
    "duration_s": 120.0,
    "max_model_len": 8192,
    "max_tokens": 1024,
    "announce_slo": True,
    "tiers": TIERS,
    **_HINTS,
}
_MIXED_MEASURES = (ATTAINMENT, GOODPUT, P99_TBT, NORMALISED)

SCENES = {
    scene.name: scene
    for scene in (
        Scene(
            name="mixed objectives",
            description="chats, agents and batch jobs with objectives of their own, short and long prompts, 1.3 times "
            "what Llama-13B serves on an A100 with 12 GiB of KV",
            measures=_MIXED_MEASURES,
            workload={**_MIXED, "rate_per_s": 1.5},
            quick={"duration_s": 20.0},
            hardware=_LLAMA,
            max_model_len=8192,
        ),
        Scene(
            name="mixed objectives, overload",
            description="the same at 3.4 times what it serves",
            measures=_MIXED_MEASURES,
            workload={**_MIXED, "rate_per_s": 4.0},
            quick={"duration_s": 20.0},
            hardware=_LLAMA,
            max_model_len=8192,
        ),
        *(
            Scene(
                name=f"{what}, no objectives",
                description=f"{whose} lengths, OPT-13B on a V100, a queue; lengths announced with 30 % error",
                measures=(NORMALISED,),
                workload={
                    "source": source,
                    "rate_per_s": rate_per_s,
                    "duration_s": duration_s,
                    "max_model_len": 2048,
                    "max_tokens": max_tokens,
                    **_HINTS,
                },
                quick={"duration_s": duration_s / 8},
                hardware=_OPT,
                max_model_len=2048,
            )
            for what, whose, source, rate_per_s, duration_s, max_tokens in (
                ("chats", "ShareGPT's", "sharegpt-vllm", 1.0, 300.0, 1024),
                ("instructions", "Alpaca's", "alpaca-vllm", 20.0, 120.0, 512),
            )
        ),
        Scene(
            name="streams",
            description="multi-turn chats with long prompts, Mistral-7B on an A100, one TBT objective of 100 ms",
            measures=(TBT_MET, STREAM_TIME, TTFT, P99_TBT),
            workload={
                "source": "openchat-sharegpt4",
                "rate_per_s": 3.0,
                "duration_s": 120.0,
                "max_model_len": 8192,
                "max_tokens": 2048,
                "tiers": (TierSpec(name="all", tbt=SloTarget(base_s=0.1)),),
            },
            quick={"duration_s": 20.0},
            hardware=HardwareSpec(model="mistral-7b", device="a100-80"),
            max_model_len=8192,
            options={"slo": {"tbt_ms": 100.0}},
        ),
        Scene(
            name="long outputs, little memory",
            description="Past-Future's Distribution-1 at a quarter of its lengths, all at once, Llama-2-7B with 8 GiB",
            measures=(EVICTIONS, STEPS),
            workload={
                "source": "distribution-1",
                "scale_prompt": 1 / 4,
                "scale_output": 1 / 4,
                "arrivals": "at-once",
                "num_requests": 400,
                "max_model_len": 2304,
                "max_tokens": 1024,
            },
            quick={"scale_prompt": 1 / 8, "scale_output": 1 / 8, "num_requests": 120},
            hardware=HardwareSpec(model="llama-2-7b", device="a100-80", kv_memory_bytes=8 * _GIB),
            max_model_len=2304,
        ),
    )
}
