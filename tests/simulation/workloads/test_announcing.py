"""Announced output lengths."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.config import SloConfig
from vllm_ext.hints import from_extra_args
from vllm_ext.prediction.oracle import true_output_tokens
from vllm_ext.simulation.requests import SimRequest
from vllm_ext.simulation.workloads import announcing
from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.spec import WorkloadSpec
from vllm_ext.slo import resolve


def spec(**fields: object) -> WorkloadSpec:
    return WorkloadSpec.model_validate({"source": "fixed:10:400", "num_requests": 20_000} | fields)


@given(error=st.floats(0, 5))
def test_sigma_is_the_inverse_of_the_mean_error(error: float) -> None:
    assert announcing.mean_error(announcing.sigma_of(error)) == pytest.approx(error, abs=1e-9)


def test_mean_error_of_sigma_one_worked_by_hand() -> None:
    assert announcing.mean_error(1.0) == pytest.approx(math.exp(0.5) * 0.6826894921370859)


@pytest.mark.parametrize("error", [0.034, 0.092, 0.3, 1.0])
def test_announced_lengths_are_off_by_the_stated_share_on_average(error: float) -> None:
    normals = np.random.default_rng(1).normal(size=400_000)
    off = np.abs(np.exp(announcing.sigma_of(error) * normals) - 1)
    assert off.mean() == pytest.approx(error, rel=0.01)


def test_workload_announces_with_the_stated_error_and_keeps_the_true_length_to_itself() -> None:
    requests = list(build(spec(announce="hint", announce_error=0.3)).start())
    announced = np.array([(r.extra_args or {})["osl"] for r in requests])
    assert np.abs(announced / 400 - 1).mean() == pytest.approx(0.3, rel=0.03)
    assert {tuple(r.extra_args or ()) for r in requests} == {("osl",)}


def test_no_error_announces_the_length_that_will_be_served() -> None:
    request = next(build(spec(announce="hint", max_tokens=150)).start())
    assert request.extra_args == {"osl": 150}


def test_nothing_is_announced_by_default() -> None:
    assert next(build(spec()).start()).extra_args is None


TIERS = (
    {
        "name": "online",
        "ttft": {"per_prompt_token_s": 0.01, "base_s": 0.5, "low": 0.5, "high": 1.5},
        "tbt": {"base_s": 0.1875, "low": 0.75, "high": 1.25},
    },
    {"name": "offline", "e2e": {"base_s": 60.0}},
    {"name": "best effort"},
)


def test_objectives_are_said_as_they_are_judged_and_only_those_that_a_request_has() -> None:
    requests = list(build(spec(num_requests=200, announce_slo=True, tiers=TIERS)).start())
    said = {"online": {"ttft_slo_ms", "tbt_slo_ms"}, "offline": {"jct_slo_ms"}, "best effort": set()}
    assert {r.tier for r in requests} == set(said)
    for request in requests:
        assert set(request.extra_args or {}) == said[request.tier]
        heard = resolve(from_extra_args(request.extra_args), request.prompt_tokens, SloConfig())
        for name in ("ttft_s", "tbt_s", "e2e_s"):
            assert getattr(heard, name) == pytest.approx(getattr(request.slo, name))


def test_objectives_are_said_beside_the_length_and_change_no_other_draw() -> None:
    silent = list(build(spec(num_requests=50, announce="hint", announce_error=0.3, tiers=TIERS)).start())
    telling = list(
        build(spec(num_requests=50, announce="hint", announce_error=0.3, announce_slo=True, tiers=TIERS)).start()
    )
    assert [r.slo for r in telling] == [r.slo for r in silent]
    assert [(r.extra_args or {})["osl"] for r in telling] == [(r.extra_args or {})["osl"] for r in silent]
    assert {key for r in telling for key in r.extra_args or ()} == {"osl", "ttft_slo_ms", "tbt_slo_ms", "jct_slo_ms"}


def test_objectives_lie_beside_the_hidden_length_too() -> None:
    request = next(build(spec(announce="hidden", announce_slo=True, tiers=TIERS[1:2])).start())
    assert true_output_tokens(request.extra_args) == 400
    assert from_extra_args(request.extra_args).jct_slo_ms == 60_000


def test_objectives_stay_with_the_client_by_default() -> None:
    assert {r.extra_args for r in build(spec(num_requests=50, tiers=TIERS)).start()} == {None}


def test_hidden_length_is_where_the_oracle_reads_it() -> None:
    request = next(build(spec(announce="hidden")).start())
    assert true_output_tokens(request.extra_args) == 400


def test_helper_adds_the_hidden_length_and_keeps_the_hint() -> None:
    request = SimRequest(req_id="a", arrival_s=0, prompt_tokens=1, output_tokens=9, max_tokens=5, extra_args={"osl": 7})
    revealed = announcing.with_hidden_length(request)
    assert (revealed.extra_args or {})["osl"] == 7
    assert true_output_tokens(revealed.extra_args) == 5
    assert request.extra_args == {"osl": 7}, "the original is unchanged"


def test_negative_error_is_refused() -> None:
    with pytest.raises(ValueError, match=r"announce_error=-0.1"):
        announcing.sigma_of(-0.1)
