"""Parameters that make no sense are refused by name when a policy is built, with their value."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vllm_ext.config import ConfigError
from vllm_ext.contract import Policy
from vllm_ext.systems.accelgen import SloMatch, SloSlack
from vllm_ext.systems.alise import EstimatedWait, Preemptive, RemainingTimeLevels
from vllm_ext.systems.auto import BypassOrPreempt, UrgentFirst
from vllm_ext.systems.baselines import ReserveMaximum, SkipJoin, Watermark
from vllm_ext.systems.past_future import PeakMemory
from vllm_ext.systems.pensieve import Retention
from vllm_ext.systems.sarathi import TbtBudget

BAD: list[tuple[type[Policy], str, dict[str, tuple[Any, ...]]]] = [
    (RemainingTimeLevels, "ordering", {"num_levels": (0, -1), "base_level_s": (0.0, math.nan)}),
    (RemainingTimeLevels, "ordering", {"age_limit_s": (0.0, -1.0, math.nan)}),
    (
        UrgentFirst,
        "ordering",
        {"horizon_s": (-1.0,), "age_limit_s": (0.0,), "aged_share": (0.0, 1.1), "gamma": (0.0, 4.5), "theta": (1.5,)},
    ),
    (SloSlack, "ordering", {"age_limit_s": (0.0,), "lost_steps": (-1.0,)}),
    (SkipJoin, "ordering", {"num_levels": (0,), "base_quantum_s": (0.0,), "starve_limit_s": (-1.0,)}),
    (Preemptive, "admission", {"gain_ratio": (0.0, math.nan), "min_progress_tokens": (0,)}),
    (Preemptive, "admission", {"max_preempting": (0,), "max_victims": (-1,)}),
    (BypassOrPreempt, "admission", {"gain_ratio": (0.0,), "max_passed": (-1,), "kv_reserve": (1.0,)}),
    (SloMatch, "admission", {"gamma_s": (-1.0,), "gamma_steps": (-1.0,), "lost_steps": (-1.0,)}),
    (SloMatch, "admission", {"long_prompt_tokens": (-1,), "min_progress_tokens": (0,), "max_victims": (0,)}),
    (PeakMemory, "admission", {"reserve": (1.0, -0.1), "forecast": ("guess",), "window": (0,)}),
    (PeakMemory, "admission", {"cold_requests": (-1,), "redraw_steps": (0,)}),
    (ReserveMaximum, "admission", {"reserve_tokens": (-1,), "overcommit": (0.9,)}),
    (Watermark, "admission", {"watermark": (-0.1, 0.0, 1.5)}),
    (TbtBudget, "budget", {"tile_tokens": (48, -2), "default_tbt_ms": (-1.0,), "safety": (1.5,)}),
    (TbtBudget, "budget", {"min_prefill_tokens": (-1,), "tokens": (512,)}),
    (EstimatedWait, "residency", {"choose": ("guess",), "exposed": (1.1, -0.1), "every_steps": (0,)}),
    (EstimatedWait, "residency", {"max_leaving": (0,), "tier_bits": (4,)}),
    (Retention, "residency", {"reserve": (1.0,), "tier_bits": (4,), "returns": ("soon",), "copies": ("none",)}),
]


@pytest.mark.parametrize(
    ("policy", "axis", "name", "value"),
    [(policy, axis, name, value) for policy, axis, bad in BAD for name, values in bad.items() for value in values],
)
def test_a_bad_parameter_is_named(policy: type[Policy], axis: str, name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        policy(**{name: value})
    assert caught.value.field == f"{axis}.{name}"
    assert str(value) in str(caught.value)
