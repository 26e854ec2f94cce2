"""Tiers, objectives and clients that give up."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from vllm_ext.simulation.requests import NO_SLO, SimRequest
from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.expectations import target_s
from vllm_ext.simulation.workloads.spec import SloTarget, WorkloadSpec


def requests(**fields: Any) -> list[SimRequest]:
    base = {"source": "fixed:700:20", "num_requests": 5000}
    return list(build(WorkloadSpec.model_validate(base | fields)).start())


@pytest.mark.parametrize(
    ("prompt_tokens", "expected"),
    [(1, 0.2), (512, 0.2), (513, 0.5), (1024, 0.5), (1025, 0.75), (2048, 1.0)],
)
def test_objective_by_bucket_grows_in_proportion_beyond_the_table(prompt_tokens: int, expected: float) -> None:
    target = SloTarget(bucket_tokens=512, bucket_s=(0.2, 0.5))
    assert target_s(target, prompt_tokens, 0.0) == pytest.approx(expected)


def test_linear_objective_rounds_the_prompt_up_and_draws_its_factor() -> None:
    target = SloTarget(base_s=1, per_prompt_token_s=0.001, bucket_tokens=512, low=0.5, high=1.5)
    assert target_s(target, 600, 0.25) == pytest.approx((1 + 1.024) * 0.75)


def test_accelgen_objectives_spread_over_their_ranges() -> None:
    tiers = [
        {
            "name": "online",
            "ttft": {"base_s": 0.4, "low": 0.5, "high": 1.5},
            "tbt": {"base_s": 0.1875, "low": 0.75, "high": 1.25},
        }
    ]
    made = requests(tiers=tiers)
    ttft = np.array([r.slo.ttft_s for r in made], dtype=float)
    tbt = np.array([r.slo.tbt_s for r in made], dtype=float)
    assert 0.2 <= ttft.min() < 0.202
    assert 0.598 < ttft.max() <= 0.6
    assert tbt.mean() == pytest.approx(0.1875, rel=0.01)
    assert (tbt.min(), tbt.max()) == pytest.approx((0.140625, 0.234375), rel=0.01)
    assert abs(np.corrcoef(ttft, tbt)[0, 1]) < 0.05
    assert all(r.slo.e2e_s is None and r.tier == "online" for r in made)


def test_tiers_have_their_shares_and_priorities() -> None:
    made = requests(tiers=[{"name": "gold", "share": 1, "priority": -1}, {"name": "rest", "share": 3}])
    counts = Counter((r.tier, r.priority) for r in made)
    assert counts.keys() == {("gold", -1), ("rest", 0)}
    assert counts["gold", -1] / len(made) == pytest.approx(0.25, abs=0.02)


def test_no_tiers_expect_nothing() -> None:
    assert all(r.slo is NO_SLO and r.tier == "" for r in requests(num_requests=5))


def test_stated_share_gives_up_after_exponential_times() -> None:
    waits = [r.abort_after_s for r in requests(abort_share=0.3, abort_mean_s=8)]
    known = np.array([w for w in waits if w is not None])
    assert len(known) / len(waits) == pytest.approx(0.3, abs=0.02)
    assert known.mean() == pytest.approx(8, rel=0.06)
    assert known.std() == pytest.approx(8, rel=0.08)


def test_higher_abort_share_keeps_those_who_gave_up_before() -> None:
    few, many = (
        {r.req_id: r.abort_after_s for r in requests(abort_share=share, abort_mean_s=8) if r.abort_after_s is not None}
        for share in (0.1, 0.4)
    )
    assert few.items() <= many.items()


def test_each_kind_of_draw_has_its_own_stream() -> None:
    tiers = [{"name": "a", "ttft": {"base_s": 1, "high": 2}, "tbt": {"base_s": 1, "high": 2}}, {"name": "b"}]
    plain = requests(tiers=tiers)
    crowded = requests(tiers=tiers, abort_share=0.5, abort_mean_s=1, announce="hint", announce_error=0.2, think_s=9)
    alone = requests(tiers=[{**tiers[0], "ttft": None}, tiers[1]])
    assert [(r.tier, r.slo) for r in plain] == [(r.tier, r.slo) for r in crowded]
    assert [r.slo.tbt_s for r in plain] == [r.slo.tbt_s for r in alone]
    assert [r.abort_after_s for r in crowded] == [r.abort_after_s for r in requests(abort_share=0.5, abort_mean_s=1)]
