"""The rows every conformance test runs over. A new system joins here, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.extent import quick
from tests.support.preempting import ORACLE, PREEMPTING

STEERED = "vllm_ext.scheduling.scheduler.SteeredScheduler"

AGE_LIMIT_S = 1.0
NUM_LEVELS = 3
_MANY, _FEW, _LEAST = quick(15, full=50), quick(4, full=12), quick(3, full=12)
_QUICK_AGING = {"age_limit_s": AGE_LIMIT_S, "num_levels": NUM_LEVELS, "base_level_s": 0.1}
_AGE_LIMIT = {"age_limit_s": AGE_LIMIT_S}
_TIGHT_BUDGET = {"tile_tokens": 4, "min_prefill_tokens": 4}
_SMALL_MATCH = {"long_prompt_tokens": 40, "min_progress_tokens": 2, "gamma_s": 0.2}
_MIXED_SLOS = {"ttft_ms": 300.0, "tbt_ms": 30.0}
_EAGER_PREEMPTION = {"gain_ratio": 0.05, "min_progress_tokens": 2}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One scheduler under test."""

    name: str
    scheduler_cls: str | None = STEERED
    """Qualified class name; None is upstream's AsyncScheduler, which checks the rig itself."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """``additional_config["vllm_ext"]``."""
    reads_truth: bool = False
    """An oracle: true output lengths may change its decisions."""
    aging_bound_s: float | None = None
    """Waiting time after which only older requests go first, or three others for each of these; None where the order
    is arrival, which needs no aging."""

    unaged: Mapping[str, Any] = field(default_factory=lambda: {"age_limit_s": 1e9})
    """Parameters of the ordering that switch aging off."""

    flood_starves: bool = True
    """Without aging, a flood of short requests with tight objectives would starve a long one with a loose objective."""
    examples: int = _FEW
    """How many traces a property is tried on: systems people are to use get most, ablations and oracles least."""

    def __str__(self) -> str:
        return self.name


SYSTEMS = (
    Row(name="upstream", scheduler_cls=None, examples=_MANY),
    Row(name="fcfs", options={"system": "fcfs"}, examples=_MANY),
    Row(
        name="alise",
        examples=_MANY,
        options={"system": "alise", "ordering": _AGE_LIMIT},
        aging_bound_s=AGE_LIMIT_S,
    ),
    Row(
        name="alise-ttft",
        options={"system": "alise-ttft", "ordering": {**_AGE_LIMIT, "back_after_s": 0.5}},
        aging_bound_s=AGE_LIMIT_S,
    ),
    Row(name="fcfs-tuned", options={"system": "fcfs-tuned"}),
    Row(
        name="fair",
        options={"system": "fair+alise", "ordering": _AGE_LIMIT},
        aging_bound_s=AGE_LIMIT_S,
    ),
    Row(
        name="oracle-alise",
        options={"system": "oracle-alise", "allow_oracle": True, "ordering": _AGE_LIMIT},
        reads_truth=True,
        aging_bound_s=AGE_LIMIT_S,
        examples=_LEAST,
    ),
    Row(
        name="preempting",
        options={"system": PREEMPTING, "ordering": _QUICK_AGING, "admission": _EAGER_PREEMPTION},
        aging_bound_s=AGE_LIMIT_S * NUM_LEVELS,
    ),
    Row(
        name="oracle-preempting",
        options={"system": ORACLE, "allow_oracle": True, "ordering": _QUICK_AGING, "admission": _EAGER_PREEMPTION},
        reads_truth=True,
        aging_bound_s=AGE_LIMIT_S * NUM_LEVELS,
        examples=_LEAST,
    ),
    Row(name="orca", options={"system": "orca"}),
    Row(name="vllm-2023", options={"system": "vllm-2023", "admission": {"watermark": 0.9}}),
    Row(name="fastgen", options={"system": "fastgen", "budget": {"tokens": 24}}),
    Row(
        name="fastserve",
        options={
            "system": "fastserve",
            "ordering": {"starve_limit_s": AGE_LIMIT_S, "base_quantum_s": 0.05},
            "admission": {"min_progress_tokens": 2},
        },
        aging_bound_s=AGE_LIMIT_S,
        flood_starves=False,  # who has run a little ranks below who has not, and new ones are alike
    ),
    Row(
        name="sarathi",
        options={"system": "sarathi", "budget": _TIGHT_BUDGET, "slo": {"tbt_ms": 15.0}},
        examples=_MANY,
    ),
    Row(name="sarathi-static", options={"system": "sarathi-static", "budget": {**_TIGHT_BUDGET, "tokens": 16}}),
    Row(
        name="sarathi-published",
        options={"system": "sarathi-published", "budget": {"tile_tokens": 4, "tokens": 16}},
        examples=_LEAST,
    ),
    Row(
        name="alise-published",
        options={"system": "alise-published", "ordering": _QUICK_AGING, "admission": {"min_progress_tokens": 2}},
        aging_bound_s=AGE_LIMIT_S * NUM_LEVELS,
        examples=_LEAST,
    ),
    Row(
        name="past-future-published",
        options={"system": "past-future-published", "admission": {"cold_requests": 4, "window": 32}},
        examples=_LEAST,
    ),
    Row(name="sarathi-hybrid-only", options={"system": "sarathi-hybrid-only"}, examples=_LEAST),
    Row(
        name="sarathi-chunked-only",
        options={"system": "sarathi-chunked-only", "budget": {"tokens": 16}},
        examples=_LEAST,
    ),
    Row(
        name="oracle-sarathi",
        options={"system": "oracle-sarathi", "allow_oracle": True, "budget": _TIGHT_BUDGET},
        reads_truth=True,
        examples=_LEAST,
    ),
    *(
        Row(
            name=name,
            options={"system": name, "slo": _MIXED_SLOS, **options},
            aging_bound_s=None if name == "accelgen-no-order" else AGE_LIMIT_S,
            reads_truth="allow_oracle" in options,
            examples=_MANY if name == "accelgen" else _LEAST,
        )
        for name, options in (
            ("accelgen", {"ordering": _AGE_LIMIT, "admission": _SMALL_MATCH}),
            ("accelgen-no-chunk", {"ordering": _AGE_LIMIT, "admission": _SMALL_MATCH}),
            ("accelgen-no-order", {"admission": _SMALL_MATCH}),
            ("accelgen-no-batch", {"ordering": _AGE_LIMIT, "admission": _SMALL_MATCH}),
            ("accelgen-no-era", {"ordering": _AGE_LIMIT, "admission": _SMALL_MATCH}),
            ("accelgen-published", {"ordering": _AGE_LIMIT, "admission": _SMALL_MATCH}),
            (
                "oracle-accelgen",
                {"ordering": _AGE_LIMIT, "admission": _SMALL_MATCH, "allow_oracle": True},
            ),
        )
    ),
    Row(
        name="past-future",
        options={"system": "past-future", "admission": {"cold_requests": 4, "window": 32}},
        examples=_MANY,
    ),
    Row(
        name="auto",
        options={
            "system": "auto",
            "slo": _MIXED_SLOS,
            "ordering": {"age_limit_s": AGE_LIMIT_S, "horizon_s": 0.1},
            "admission": _EAGER_PREEMPTION,
            "budget": _TIGHT_BUDGET,
        },
        aging_bound_s=AGE_LIMIT_S,
        examples=_MANY,
    ),
    Row(name="pensieve", options={"system": "pensieve"}, examples=_MANY),
    Row(
        name="oracle-past-future",
        options={"system": "oracle-past-future", "allow_oracle": True},
        reads_truth=True,
        examples=_LEAST,
    ),
    Row(name="aggressive", options={"system": "aggressive", "admission": {"watermark": 0.9}}, examples=_LEAST),
    Row(name="conservative", options={"system": "conservative", "admission": {"overcommit": 1.5}}, examples=_LEAST),
    Row(
        name="alise+pensieve",
        options={"system": "alise+pensieve", "ordering": _AGE_LIMIT},
        aging_bound_s=AGE_LIMIT_S,
        examples=_LEAST,
    ),
    Row(
        name="sarathi+past-future",
        options={"system": "sarathi+past-future", "budget": _TIGHT_BUDGET},
        examples=_LEAST,
    ),
    Row(
        name="alise+past-future",
        options={
            "system": "alise+past-future",
            "ordering": _AGE_LIMIT,
            "admission": {"cold_requests": 4, "window": 32},
        },
        aging_bound_s=AGE_LIMIT_S,
        examples=_LEAST,
    ),
    Row(
        name="alise+sarathi",
        options={
            "system": "alise+sarathi",
            "ordering": _AGE_LIMIT,
            "budget": _TIGHT_BUDGET,
        },
        aging_bound_s=AGE_LIMIT_S,
        examples=_LEAST,
    ),
)
