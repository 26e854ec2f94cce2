"""Invariant 3: a stream of better-ranked requests holds nobody back longer than the documented aging bound."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from tests.support.conformance_rig import STEP_S, Arrival, Rig, RigConfig
from tests.support.systems_matrix import SYSTEMS, Row

_SHORT = Arrival(prompt_len=4, max_tokens=8, true_len=2, osl=2, ttft_slo_ms=500.0)
_LONG = Arrival(prompt_len=20, max_tokens=48, true_len=30, osl=48, ttft_slo_ms=60_000.0)
_SLACK_S = 20 * STEP_S
"""Time for a seat to free itself and for steps to be whole."""
_AGED = [row for row in SYSTEMS if row.aging_bound_s is not None]


def flood(row: Row, depth: int, until_s: float) -> tuple[float | None, float | None]:
    """Send one long request into a flood of short ones; return when it started and ended, seconds after its arrival."""
    rig = Rig(row, RigConfig(depth=depth, max_num_seqs=2, num_blocks=40))
    for _ in range(4):
        rig.arrive(_SHORT)
    long_id = rig.arrive(_LONG)
    arrived = rig.clock()
    started = ended = None
    while rig.clock() - arrived < until_s and ended is None:
        while len(rig.scheduler.waiting) < 4:
            rig.arrive(_SHORT)
        decision = rig.step()
        if started is None and decision is not None and long_id in dict(decision.scheduled):
            started = rig.clock() - arrived
        if rig.loop.outcomes[long_id].finish_reason is not None:
            ended = rig.clock() - arrived
    rig.drain()
    return started, ended


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("row", _AGED, ids=str)
def test_invariant_3_wait_behind_younger_requests_ends_at_the_aging_bound(row: Row, depth: int) -> None:
    assert row.aging_bound_s is not None
    service_s = (_LONG.true_len + 2) * STEP_S
    started, ended = flood(row, depth, until_s=3 * row.aging_bound_s)
    assert started is not None
    assert started <= row.aging_bound_s + _SLACK_S
    assert ended is not None
    assert ended <= row.aging_bound_s + 2 * service_s + 2 * _SLACK_S


@pytest.mark.parametrize("name", ["alise", "alise-ttft", "auto", "accelgen", "fair+alise", "alise+sarathi"])
def test_invariant_3_it_ends_there_with_the_parameters_that_ship(name: str) -> None:
    row = Row(name=name, options={"system": name})
    policy = Rig(row, RigConfig()).scheduler.policies.ordering
    started, _ = flood(row, 1, until_s=1.2 * policy.age_limit_s)
    assert started is not None
    assert started <= policy.age_limit_s + _SLACK_S


@pytest.mark.parametrize("row", [row for row in _AGED if row.flood_starves], ids=str)
def test_invariant_3_the_flood_would_starve_without_aging(row: Row) -> None:
    """The bound above is due to aging, not to a flood too weak to hold anyone back."""
    assert row.aging_bound_s is not None
    options = copy.deepcopy(dict(row.options))
    options["ordering"] = {**options["ordering"], **row.unaged}
    started, _ = flood(replace(row, options=options), 1, until_s=2 * row.aging_bound_s)
    assert started is None


@pytest.mark.parametrize("row", [row for row in SYSTEMS if row.aging_bound_s is None], ids=str)
def test_invariant_3_arrival_order_needs_no_aging(row: Row) -> None:
    started, _ = flood(row, 1, until_s=1.0)
    assert started is not None
