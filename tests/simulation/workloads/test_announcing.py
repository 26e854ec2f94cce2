"""Announced output lengths."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.prediction.oracle import true_output_tokens
from vllm_ext.simulation.requests import SimRequest
from vllm_ext.simulation.workloads import announcing
from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.spec import WorkloadSpec


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
