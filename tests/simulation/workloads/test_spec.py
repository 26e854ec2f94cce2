"""The description of a workload: what it accepts, refuses and survives."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from vllm_ext.simulation.workloads.spec import MixPart, SloTarget, TierSpec, WorkloadSpec

FULL: dict[str, Any] = {
    "mix": [
        {"source": "arxiv-summarization", "weight": 0.35, "tier": "offline", "max_prompt_tokens": 9000},
        {"source": "rows.jsonl", "weight": 0.65, "sample": "with-replacement", "where": {"src": ["a", "b"]}},
    ],
    "arrivals": "gamma",
    "rate_per_s": 8.0,
    "cv": 2.5,
    "num_requests": 20_000,
    "max_tokens": "exact",
    "announce": "hint",
    "announce_error": 0.092,
    "announce_slo": True,
    "tiers": [
        {"name": "offline", "share": 0, "e2e": {"base_s": 60}},
        {"name": "chat", "ttft": {"bucket_tokens": 512, "bucket_s": [0.1, 0.2], "low": 0.5, "high": 1.5}},
    ],
    "abort_share": 0.1,
    "abort_mean_s": 20,
    "seed": 3,
}


def test_full_description_survives_json() -> None:
    spec = WorkloadSpec(**FULL)
    assert WorkloadSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize("arrivals", ["recorded", "closed-loop", "at-once"])
def test_arrivals_without_a_rate_have_none_unless_given_and_survive_json(arrivals: str) -> None:
    spec = WorkloadSpec.model_validate({"arrivals": arrivals})
    assert spec.rate_per_s is None
    assert WorkloadSpec.model_validate_json(spec.model_dump_json()) == spec


def test_recorded_arrivals_take_a_rate_to_stretch_to() -> None:
    assert WorkloadSpec(arrivals="recorded", rate_per_s=3.0).rate_per_s == 3.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rate_per_s": 0}, r"rate_per_s\n.*greater than 0"),
        ({"rate_per_s": float("inf")}, r"rate_per_s\n.*finite"),
        ({"rate_per_s": None}, r"rate_per_s=None: must be a number greater than 0 for arrivals='poisson'"),
        ({"arrivals": "closed-loop", "rate_per_s": 2}, r"rate_per_s=2.0: must be left out for arrivals='closed-loop'"),
        ({"cv": 2}, r"cv=2.0: needs arrivals='gamma', found 'poisson'"),
        ({"clients": 2}, r"clients=2: needs arrivals='closed-loop', found 'poisson'"),
        ({"num_requests": -1}, r"num_requests\n"),
        ({"announce_slo": True}, r"announce_slo=True: needs tiers, one of them with an objective"),
        ({"announce_slo": True, "tiers": [{"name": "a"}]}, r"announce_slo=True: needs tiers"),
        ({"max_tokens": 0}, r"max_tokens=0: must be at least 1, 'cap' or 'exact'"),
        ({"max_tokens": "true"}, r"max_tokens"),
        ({"announce_error": 0.1}, r"announce_error=0.1: needs announce='hint', found 'none'"),
        ({"abort_share": 0.1}, r"abort_share=0.1, abort_mean_s=None: must be given together"),
        ({"min_prompt_tokens": 9, "max_prompt_tokens": 8}, r"min_prompt_tokens=9: must be at most max_prompt_tokens=8"),
        ({"source": "x.csv", "mix": [{}]}, r"source='x.csv': must be set in each part of mix"),
        ({"mix": [{"tier": "gold"}]}, r"tier='gold' of a part of mix: must be one of \[\]"),
        ({"mix": [{}], "arrivals": "recorded"}, r"arrivals='recorded': must not be used with mix"),
        ({"arrivals": "recorded", "sample": "with-replacement"}, r"arrivals='recorded': needs sample='file-order'"),
        ({"tiers": [{"name": "a"}, {"name": "a"}]}, r"tiers: names must differ"),
        ({"tiers": [{"name": "a", "share": 0}]}, r"share must be greater than 0"),
        ({"sorce": "alpaca-like"}, r"sorce\n.*not permitted"),
    ],
)
def test_senseless_description_is_refused_naming_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        WorkloadSpec.model_validate(fields)


@pytest.mark.parametrize("fields", [{}, {"base_s": 1, "low": 2, "high": 1}, {"bucket_s": [0.1, 0]}, {"base_s": -1}])
def test_objective_must_be_positive_and_its_bounds_in_order(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SloTarget.model_validate(fields)


def test_parts_and_tiers_have_positive_weights_and_names() -> None:
    with pytest.raises(ValidationError, match="weight"):
        MixPart(weight=0)
    with pytest.raises(ValidationError, match="name"):
        TierSpec(name="")
