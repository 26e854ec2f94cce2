"""The description of a workload: what it accepts, refuses and survives, and that its page says what is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from vllm_ext import datasets
from vllm_ext.simulation.workloads import synthetic
from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.spec import WorkloadSpec

from .parts import workload

PAGE = (Path(__file__).parents[3] / "docs" / "simulator-inputs.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)


def test_every_preset_and_format_is_on_the_page() -> None:
    formats, presets = (PAGE.split(f"## {name}\n")[1].split("\n## ")[0] for name in ("Files", "Presets"))
    assert {*datasets.FORMATS} - {"auto"} <= set(re.findall(r"^\| `([^`]+)`", formats, re.MULTILINE))
    assert {*synthetic.PRESETS, *synthetic.CONVERSATIONS} <= set(re.findall(r"`([^`\n]+)`", presets))


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_survive_json_and_can_be_built(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.jsonl").write_text(
        "".join(f'{{"prompt_tokens": 3, "output_tokens": 4, "timestamp": {t}}}\n' for t in (1, 2))
    )
    spec = WorkloadSpec.model_validate_json(example)
    assert WorkloadSpec.model_validate_json(spec.model_dump_json()) == spec
    load = build(spec, max_model_len=32768)
    assert next(load.start()).arrival_s >= 0


@pytest.mark.parametrize("arrivals", ["recorded", "closed-loop", "at-once"])
def test_arrivals_without_a_rate_have_none_unless_given_and_survive_json(arrivals: str) -> None:
    spec = WorkloadSpec.model_validate({"arrivals": arrivals})
    assert spec.rate_per_s is None
    assert WorkloadSpec.model_validate_json(spec.model_dump_json()) == spec


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
        ({"min_turns": 3, "max_turns": 2}, r"max_turns=2: must be at least min_turns=3"),
        ({"max_model_len": 30, "system_prompt_tokens": 29}, r"system_prompt_tokens=29: must leave at least 2"),
        ({"sorce": "alpaca-like"}, r"sorce\n.*not permitted"),
        ({"mix": [{"weight": 0}]}, r"mix.0.weight\n.*greater than 0"),
        ({"tiers": [{"name": ""}]}, r"tiers.0.name\n.*at least 1 character"),
        ({"tiers": [{"name": "a", "ttft": {}}]}, r"base_s, per_prompt_token_s, bucket_s: one of them must be greater"),
        ({"tiers": [{"name": "a", "e2e": {"bucket_s": [0.1, 0]}}]}, r"bucket_s: one of them must be greater than 0"),
        ({"tiers": [{"name": "a", "tbt": {"base_s": 1, "low": 2}}]}, r"low=2.0: must be at most high=1.0"),
        ({"tiers": [{"name": "a", "tbt": {"base_s": -1}}]}, r"tiers.0.tbt.base_s\n.*greater than or equal to 0"),
    ],
)
def test_senseless_description_is_refused_naming_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        WorkloadSpec.model_validate(fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"num_requests=None, duration_s=None: one must be given; fixed:10:20 has no end"),
        ({"arrivals": "at-once", "duration_s": 1}, r"num_requests=None: must be given for arrivals='at-once'"),
        ({"source": "no-such"}, r"source='no-such': must be a file, or one of the presets alpaca-like, .*fixed:PROMPT"),
        ({"sample": "with-replacement", "num_requests": 1}, r"sample='with-replacement': must be left out; .*a preset"),
        ({"min_turns": 2, "num_requests": 1}, r"min_turns=2: must be left out; .* a preset without conversations"),
        ({"max_prompt_tokens": 9, "num_requests": 1}, r"'fixed:10:20': 100000 requests in a row were left out; widen"),
    ],
)
def test_what_cannot_be_built_is_refused_naming_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        workload(**fields)


def test_changed_copy_is_checked_when_it_is_built() -> None:
    spec = WorkloadSpec(source="fixed:1:1", num_requests=1).model_copy(update={"rate_per_s": 0.0})
    with pytest.raises(ValidationError, match=r"rate_per_s\n"):
        build(spec)
