"""The workloads of ordering.py, the systems that serve them, and what is measured. Nothing is run from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_ext.experiments.experiment import Variant
from vllm_ext.simulation.cost.spec import HardwareSpec
from vllm_ext.simulation.spec import SimulationSpec

TUNED, AGAIN = "upstream tuned", "upstream tuned, other seeds"
OTHER_SEEDS = 1000
"""Added to the seeds of the A/A row."""
WATERMARK = 0.05
_BACKLOG = 600
"""Clients that keep a queue: more than two for each seat."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One number of a run."""

    name: str
    metric: str
    """As in `vllm_ext.simulation.measure.metrics`."""
    higher: bool = False
    """Whether more is better."""
    points: bool = False
    """Compared by the difference in percentage points, not by the ratio."""
    floor: float = 0.0
    """Added to both sides of a ratio, where values may be 0."""


MEASURES = (
    Measure(name="mean normalised", metric="normalised_latency_mean_ms_per_token"),
    Measure(name="P50 normalised", metric="normalised_latency_p50_ms_per_token"),
    Measure(name="P90 normalised", metric="normalised_latency_p90_ms_per_token"),
    Measure(name="mean e2e", metric="e2e_mean_ms"),
    Measure(name="P90 e2e", metric="e2e_p90_ms"),
    Measure(name="P99 e2e", metric="e2e_p99_ms"),
    Measure(name="mean TTFT", metric="ttft_mean_ms"),
    Measure(name="P50 TTFT", metric="ttft_p50_ms"),
    Measure(name="P90 TTFT", metric="ttft_p90_ms"),
    Measure(name="P99 TTFT", metric="ttft_p99_ms"),
    Measure(name="share on time", metric="on_time_fraction", higher=True, points=True),
    Measure(name="longest gap", metric="tbt_max_ms"),
    Measure(name="longest wait", metric="waited_max_s", floor=0.1),
    Measure(name="preemptions", metric="preemptions", floor=1.0),
    Measure(name="throughput", metric="throughput_requests_per_s", higher=True),
)


_OPT = HardwareSpec(model="opt-13b", device="a100-40")


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Whose lengths, on which hardware."""

    path: str
    """Below the folder of data."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of a `WorkloadSpec`."""
    prompts: str = ""
    """File whose prompt lengths are drawn, where the first has none."""
    hardware: HardwareSpec = _OPT
    engine: Mapping[str, Any] = field(default_factory=lambda: {"max_model_len": 2048})
    duration_s: float = 600.0
    group: str = ""
    """Which of the issue's goals for the mean end-to-end latency it has: ``chat``, ``alpaca``, ``azure`` or none."""
    loads: tuple[float, ...] = ()
    """Its own instead of those that were asked for."""
    texts: bool = False
    """Whether it has prompts and answers, so that lengths can be predicted."""
    predicted: tuple[Path, Path] | None = None
    """Files of `ordering_predicted` instead: with own predictions, and with those of others."""

    def with_predictions(self, data: Path, folder: Path) -> Scene:
        """Return it with half of its requests, of which the shipped predictor said something beforehand."""
        from ordering_predicted import make

        where = self.fields.get("where", {})
        fields = {key: value for key, value in self.fields.items() if key != "where"}
        return replace(self, fields=fields, predicted=make(data / self.path, folder, where))

    def missing(self, data: Path) -> list[str]:
        """Return the files that are not there."""
        return [name for name in filter(None, (self.path, self.prompts)) if not (data / name).is_file()]

    def backlogged(self, data: Path, system: str, seed: int, span_s: float) -> SimulationSpec:
        """Return a run of ``span_s`` in which there is always more than is served, with all turns of conversations."""
        clients = {"arrivals": "closed-loop", "rate_per_s": None, "cv": 1.0, "clients": _BACKLOG, "duration_s": span_s}
        made = self.spec(data, system, seed, **clients, rate_counts="sessions")
        return made.model_copy(update={"max_time_s": span_s})

    def requests(self, data: Path) -> dict[str, Any]:
        """Return whose lengths requests have: fields of a `WorkloadSpec`."""
        prompts = {"prompts_from": str(data / self.prompts)} if self.prompts else {}
        drawn = {"source": str(data / self.path), "sample": "with-replacement", "over_context": "cut"}
        return {**drawn, **prompts, **self.fields}

    def spec(self, data: Path, system: str, seed: int, **arrivals: Any) -> SimulationSpec:
        """Return a run; ``arrivals`` says how many come when: fields of a `WorkloadSpec`."""
        chosen = SYSTEMS[system]
        predicted = {} if self.predicted is None else {"source": str(self.predicted[system == ANOTHERS])}
        workload = {
            "max_model_len": self.engine["max_model_len"],
            **self.requests(data),
            **predicted,
            **arrivals,
            "seed": seed + (OTHER_SEEDS if system == AGAIN else 0),
        }
        engine = {**self.engine, "profiled": not chosen.system.startswith("upstream")}
        return chosen.spec(engine=engine, hardware=self.hardware, workload=workload)


_LLAMA = HardwareSpec(model="llama-2-7b", device="a100-40")
_H100 = HardwareSpec(model="llama-3.1-8b", device="h100")
_SHAREGPT, _WILDCHAT = "multi_turn/sharegpt.jsonl.gz", "single_turn/wildchat_first1445.jsonl.gz"
_CHAT = {"max_tokens": 1024}
_TALK = {"conversations": True, "max_turns": 6, "think_s": 30.0, "rate_counts": "requests", **_CHAT}

SCENES: Mapping[str, Scene] = {
    "alpaca": Scene(
        path="single_turn/alpaca.jsonl.gz",
        fields={"where": {"src": ("random9k", "subset5k")}, "min_output_tokens": 1, "max_tokens": 1024},
        duration_s=300.0,
        group="alpaca",
        texts=True,
    ),
    "sharegpt": Scene(path=_SHAREGPT, fields=_CHAT, group="chat", texts=True),
    "wildchat": Scene(path=_WILDCHAT, fields=_CHAT, group="chat", texts=True),
    "lmsys": Scene(path="single_turn/lmsys_output_lengths.csv.gz", prompts=_WILDCHAT, fields=_CHAT, group="chat"),
    "azure-conv": Scene(
        path="traces/azure_2023_conv.csv.gz",
        fields=_CHAT,
        hardware=_LLAMA,
        engine={"max_model_len": 4096},
        group="azure",
    ),
    "azure-code": Scene(
        path="traces/azure_2023_code.csv.gz", fields=_CHAT, hardware=_LLAMA, engine={"max_model_len": 4096}
    ),
    "mooncake": Scene(
        path="traces/mooncake_conversation.jsonl.gz",
        fields={"sample": "file-order", "over_context": "drop", "max_tokens": 1024},
        hardware=_H100,
        engine={"max_model_len": 32_768, "max_num_batched_tokens": 8192},
        duration_s=300.0,
    ),
    "conversations": Scene(path=_SHAREGPT, fields=_TALK),
    "bursts": Scene(path=_SHAREGPT, fields={**_CHAT, "arrivals": "gamma", "cv": 3.0}, loads=(0.7, 0.85)),
}
"""Bursts are gamma arrivals with a coefficient of variation of 3: the simulator has no alternating rate."""

_HINT: dict[str, Any] = {"announce": "hint", "announce_error": 0.3}
PREDICTED, ANOTHERS = "alise, predicted", "alise, another's prediction"
"""By the predictor that ships, learned from others of the same file; and what it said of another request."""
_TIER: dict[str, Any] = {"kv_tier": {"gib": 64.0}}
_ASKED: dict[str, Any] = {"prediction": {"sources": ["hint", "retrieval", "history"]}}
_PREDICTED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (PREDICTED, "alise", {}),
    (ANOTHERS, "alise", {}),
    ("auto, predicted", "auto", {}),
    ("alise, predicted, tier", "alise", _TIER),
    ("alise-ttft, predicted, tier", "alise-ttft", _TIER),
)
NEED_PREDICTIONS = tuple(name for name, _, _ in _PREDICTED)
_FEWER_TOKENS: dict[str, Any] = {"max_num_batched_tokens": 512}
OTHERWISE_TUNED: Mapping[str, dict[str, Any]] = {
    "upstream tuned, 512 tokens": _FEWER_TOKENS,
    "upstream tuned, 8192 tokens": {"max_num_batched_tokens": 8192},
    "upstream tuned, 128 seats": {"max_num_seqs": 128},
    "upstream tuned, 512 seats": {"max_num_seqs": 512},
}
"""What an operator could also turn: whether one of these is the better baseline is seen in the same table."""
_ORACLE: dict[str, Any] = {"options": {"allow_oracle": True}, "workload": {"announce": "hidden"}}
SYSTEMS = {
    one.name: one
    for one in (
        Variant(name="upstream", system="upstream-fcfs"),
        Variant(name=TUNED, system="upstream-fcfs", engine={"watermark": WATERMARK}),
        Variant(name=AGAIN, system="upstream-fcfs", engine={"watermark": WATERMARK}),
        *(
            Variant(name=name, system="upstream-fcfs", engine={"watermark": WATERMARK, **other})
            for name, other in OTHERWISE_TUNED.items()
        ),
        *(Variant(name=name, system=name) for name in ("fcfs-tuned", "alise-published", "fastserve", "alise", "auto")),
        Variant(name="alise, 512 tokens", system="alise", engine=_FEWER_TOKENS),
        Variant(name="alise, lengths within 30 %", system="alise", workload=_HINT),
        *(
            Variant(name=name, system=system, options={**options, **_ASKED}, workload={"announce": "predicted"})
            for name, system, options in _PREDICTED
        ),
        Variant(name="alise-published, lengths within 30 %", system="alise-published", workload=_HINT),
        *(
            Variant(name=f"{name}, tier", system=name, options=_TIER)
            for name in ("alise-published", "alise", "alise-ttft")
        ),
        Variant(name="alise-ttft, lengths within 30 %, tier", system="alise-ttft", options=_TIER, workload=_HINT),
        Variant(name="oracle-alise", system="oracle-alise", **_ORACLE),
    )
}
"""By the names in the tables. `alise` by itself knows of lengths what it has seen end."""
