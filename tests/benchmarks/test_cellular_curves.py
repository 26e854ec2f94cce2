"""Curves of cellular batching: which loads are served, what counts as sustained, and what is compared."""

from __future__ import annotations

from importlib import import_module as script
from typing import Any

import pytest

from vllm_ext.repro.batching.curves import Point


@pytest.fixture
def bench() -> Any:
    return script("cellular_curves")


def point(load: float, p90_ms: float) -> Point:
    return Point(load_per_s=load, served_per_s=load, p50_ms=1.0, p90_ms=p90_ms, p99_ms=900.0)


def test_a_load_is_sustained_if_its_median_is(bench: Any) -> None:
    assert bench.middle([point(5, 100), point(5, 700), point(5, 200)]).sustained
    assert not bench.middle([point(5, 100), point(5, 700), point(5, 600)]).sustained


def test_a_manner_stops_at_the_second_load_that_it_does_not_sustain(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity = {"cellular": 9.0, "padded": 2.0}
    asked: list[tuple[str, float]] = []

    def served(case: Any, make: Any, batch: int, load: float, seconds: float, seed: int) -> Point:
        asked.append((make, load))
        return point(load, 100.0 if load <= capacity[make] else 1e4)

    monkeypatch.setattr(bench, "served", served)
    case = bench.Case(model=None, requests=[], manners={name: name for name in capacity})
    found = bench.curves(case, 8, [1.0, 2.0, 3.0, 4.0, 5.0], 1.0, [0])
    assert [p.load_per_s for p in found["padded"]] == [1.0, 2.0, 3.0, 4.0]
    assert [p.load_per_s for p in found["cellular"]] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert asked[:2] == [("cellular", 1.0), ("padded", 1.0)], "in turns"


def test_real_requests_are_served_and_their_latencies_count_from_arrival(bench: Any) -> None:
    case = bench.cases(20, 0, {"dynet": 1e-6, "fold": 1e-6})["treelstm"]
    assert set(case.manners) == {"cellular", "cellular, 512", "dynet", "fold", "one by one"}
    for name, make in case.manners.items():
        one = bench.served(case, make, 8, 200.0, 0.1, 0)
        assert 0 < one.p50_ms <= one.p90_ms <= one.p99_ms, name
        assert one.load_per_s == 200.0
