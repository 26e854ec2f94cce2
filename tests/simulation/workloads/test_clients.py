"""What clients announce and expect, to which tier they belong, and when they give up."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.config import SloConfig
from vllm_ext.contract.objective import resolve
from vllm_ext.hints import from_extra_args
from vllm_ext.prediction.oracle import true_output_tokens
from vllm_ext.simulation.workloads.build import mean_error, sigma_of
from vllm_ext.simulation.workloads.requests import NO_SLO
from vllm_ext.simulation.workloads.spec import SloTarget

from .parts import jsonl, requests

TIERS = (
    {
        "name": "online",
        "ttft": {"per_prompt_token_s": 0.01, "base_s": 0.5, "low": 0.5, "high": 1.5},
        "tbt": {"base_s": 0.1875, "low": 0.75, "high": 1.25},
    },
    {"name": "offline", "e2e": {"base_s": 60.0}},
    {"name": "best effort"},
)


@given(error=st.floats(0, 5))
def test_sigma_is_the_inverse_of_the_mean_error(error: float) -> None:
    assert mean_error(sigma_of(error)) == pytest.approx(error, abs=1e-9)


@pytest.mark.parametrize("error", [0.034, 0.3, 1.0])
def test_announced_lengths_are_off_by_the_stated_share_and_the_true_length_is_kept(error: float) -> None:
    made = requests(source="fixed:10:4000", num_requests=20_000, announce="hint", announce_error=error)
    announced = np.array([(r.extra_args or {})["osl"] for r in made])
    assert np.abs(announced / 4000 - 1).mean() == pytest.approx(error, rel=0.05)
    assert {tuple(r.extra_args or ()) for r in made} == {("osl",)}


@pytest.mark.parametrize(
    ("fields", "said"),
    [({}, None), ({"tiers": TIERS}, None), ({"announce": "hint", "max_tokens": 15}, {"osl": 15})],
    ids=["nothing by default", "no objectives by default", "without error what will be served"],
)
def test_what_every_client_says_and_without_tiers_expects(fields: dict[str, Any], said: dict[str, int] | None) -> None:
    for request in requests(num_requests=50, **fields):
        assert request.extra_args == said
        assert "tiers" in fields or (request.slo is NO_SLO and request.tier == "")


def test_hidden_length_is_where_the_oracle_reads_it_and_objectives_lie_beside() -> None:
    (request,) = requests(num_requests=1, announce="hidden", announce_slo=True, tiers=TIERS[1:2])
    assert true_output_tokens(request.extra_args) == 20
    assert from_extra_args(request.extra_args).jct_slo_ms == 60_000


@pytest.mark.parametrize(("announce", "told"), [("predicted", True), ("none", False), ("hint", False)])
def test_what_a_predictor_said_is_the_file_s(tmp_path: Path, announce: str, told: bool) -> None:
    said = [[n + i for i in range(9)] for n in (1, 50)]
    source = jsonl(tmp_path, *({"prompt_tokens": 5, "output_tokens": q[4], "output_quantiles": q} for q in said))
    found = requests(source=source, sample="file-order", announce=announce, num_requests=2)
    assert [request.predicted for request in found] == ([tuple(q) for q in said] if told else [None, None])
    assert all("osl" not in (request.extra_args or {}) for request in found) == (announce != "hint")


def test_objectives_are_said_as_they_are_judged_and_only_those_that_a_request_has() -> None:
    said = {"online": {"ttft_slo_ms", "tbt_slo_ms"}, "offline": {"jct_slo_ms"}, "best effort": set()}
    made = requests(num_requests=200, announce_slo=True, tiers=TIERS)
    assert {r.tier for r in made} == set(said)
    for request in made:
        assert set(request.extra_args or {}) == said[request.tier]
        heard = resolve(from_extra_args(request.extra_args), request.prompt_tokens, SloConfig())
        for name in ("ttft_s", "tbt_s", "e2e_s"):
            assert getattr(heard, name) == pytest.approx(getattr(request.slo, name))


@pytest.mark.parametrize(
    ("prompt_tokens", "expected"),
    [(1, 0.2), (512, 0.2), (513, 0.5), (1024, 0.5), (1025, 0.75), (2048, 1.0)],
)
def test_objective_by_bucket_grows_in_proportion_beyond_the_table(prompt_tokens: int, expected: float) -> None:
    target = SloTarget(bucket_tokens=512, bucket_s=(0.2, 0.5))
    assert target.seconds(prompt_tokens, 0.0) == pytest.approx(expected)


def test_linear_objective_rounds_the_prompt_up_and_draws_its_factor() -> None:
    target = SloTarget(base_s=1, per_prompt_token_s=0.001, bucket_tokens=512, low=0.5, high=1.5)
    assert target.seconds(600, 0.25) == pytest.approx((1 + 1.024) * 0.75)


def test_objectives_spread_over_their_ranges_independently_of_each_other() -> None:
    made = requests(source="fixed:10:20", num_requests=5000, tiers=TIERS[:1])
    ttft, tbt = (np.array([getattr(r.slo, name) for r in made], dtype=float) for name in ("ttft_s", "tbt_s"))
    assert (ttft.min(), ttft.max()) == pytest.approx((0.3, 0.9), rel=0.01)
    assert (tbt.min(), tbt.mean(), tbt.max()) == pytest.approx((0.140625, 0.1875, 0.234375), rel=0.01)
    assert abs(np.corrcoef(ttft, tbt)[0, 1]) < 0.05
    assert all(r.slo.e2e_s is None and r.tier == "online" for r in made)


def test_tiers_have_their_shares_and_priorities() -> None:
    made = requests(num_requests=5000, tiers=[{"name": "gold", "priority": -1}, {"name": "rest", "share": 3}])
    found = Counter((r.tier, r.priority) for r in made)
    assert found.keys() == {("gold", -1), ("rest", 0)}
    assert found["gold", -1] / len(made) == pytest.approx(0.25, abs=0.02)


def test_stated_share_gives_up_after_exponential_times_and_a_higher_one_keeps_those_who_did() -> None:
    few, many = (
        {r.req_id: r.abort_after_s for r in requests(num_requests=5000, abort_share=share, abort_mean_s=8)}
        for share in (0.1, 0.4)
    )
    known = np.array([after_s for after_s in many.values() if after_s is not None])
    assert len(known) / len(many) == pytest.approx(0.4, abs=0.02)
    assert known.mean() == pytest.approx(8, rel=0.06)
    assert known.std() == pytest.approx(8, rel=0.08)
    assert {(req_id, after_s) for req_id, after_s in few.items() if after_s is not None} <= many.items()


def test_drawing_something_more_shifts_no_other_draw() -> None:
    features: dict[str, dict[str, Any]] = {
        "slo": {"tiers": TIERS},
        "extra_args": {"announce": "hint", "announce_error": 0.3},
        "abort_after_s": {"abort_share": 0.5, "abort_mean_s": 3},
        "arrival_s": {"think_s": 5},
    }
    every = requests(
        source="sharegpt-like", num_requests=2500, **{k: v for f in features.values() for k, v in f.items()}
    )
    for field, feature in features.items():
        alone = requests(source="sharegpt-like", num_requests=2500, **feature)
        for name in ("prompt_tokens", "output_tokens", "arrival_s", field):
            assert [getattr(r, name) for r in alone] == [getattr(r, name) for r in every]
    without_ttft = requests(source="sharegpt-like", num_requests=2500, tiers=[TIERS[0] | {"ttft": None}, *TIERS[1:]])
    assert [r.slo.tbt_s for r in without_ttft] == [r.slo.tbt_s for r in every]
