"""Curves of cellular batching: which loads are served, what counts as sustained, and what is compared."""

from __future__ import annotations

from importlib import import_module as script
from typing import Any

import pytest

from vllm_ext.experiments.batching.curves import Point


@pytest.fixture
def bench() -> Any:
    return script("cellular_curves")


def point(load: float, p90_ms: float) -> Point:
    return Point(load_per_s=load, served_per_s=load, p50_ms=1.0, p90_ms=p90_ms, p99_ms=900.0)


def test_a_load_is_sustained_if_its_median_is(bench: Any) -> None:
    assert bench.middle([point(5, 100), point(5, 700), point(5, 200)]).sustained
    assert not bench.middle([point(5, 100), point(5, 700), point(5, 600)]).sustained


def test_a_manner_gets_shares_of_its_own_capacity_and_stops_at_the_second_that_it_does_not_sustain(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, float]] = []

    def served(case: Any, manner: Any, batch: int, load: float, seconds: float, seed: int) -> Point:
        asked.append((manner, load))
        return point(load, 100.0 if manner == "cellular" or load < 6 else 1e4)

    monkeypatch.setattr(bench, "served", served)
    case = bench.Case(model=None, requests=[], manners={name: name for name in ("cellular", "padded")})
    chosen = {name: bench.Tuned(batch=8, capacity_per_s=rate) for name, rate in (("cellular", 40.0), ("padded", 20.0))}
    found = bench.curves(case, chosen, [0.2, 0.4, 0.6, 0.8, 1.0], 1.0, [0, 1])
    assert [load[0].load_per_s for load in found["padded"]] == [4.0, 8.0, 12.0]
    assert [load[0].load_per_s for load in found["cellular"]] == [8.0, 16.0, 24.0, 32.0, 40.0]
    assert asked[:4] == [("cellular", 8.0), ("padded", 4.0)] * 2, "in turns"
    assert [len(load) for load in found["padded"]] == [2, 2, 2]


def test_peaks_are_compared_per_seed_and_p90_at_equal_loads(bench: Any) -> None:
    ours = [[point(load, p90), point(load, 2 * p90)] for load, p90 in ((10, 100), (30, 400), (40, 450))]
    theirs = [[point(load, p90), point(load, p90)] for load, p90 in ((10, 200), (20, 400), (21, 900))]
    found = bench.compared({"lstm": {bench.OURS: ours, bench.PADDED: theirs}})
    assert found["lstm_cellular_peak_over_padded_low"] == 10 / 20
    assert found["lstm_cellular_peak_over_padded_high"] == 40 / 20
    assert found["lstm_cellular_p90_saved_over_padded_least"] == pytest.approx(1 - 150 / 200)


def test_the_batch_with_the_highest_throughput_is_chosen(bench: Any) -> None:
    case = bench.cases(20, 0, {"dynet": 1e-6, "fold": 1e-6})["lstm"]
    chosen = bench.tuned(case, bench.Manner(batches=(1, 64)), 100)
    assert chosen.batch == 64, "a batch of one is several times slower"


def test_real_requests_are_served_and_their_latencies_count_from_arrival(bench: Any) -> None:
    cases = bench.cases(20, 0, {"dynet": 1e-6, "fold": 1e-6})
    assert {*cases["treelstm"].manners} == {"cellular", "dynet", "fold", "one by one"}
    assert {*cases["seq2seq"].manners} == {"cellular", "cellular, published", "padded", "padded (A/A)", "one by one"}
    for name, manner in cases["treelstm"].manners.items():
        one = bench.served(cases["treelstm"], manner, manner.batches[0], 200.0, 0.1, 0)
        assert 0 < one.p50_ms <= one.p90_ms <= one.p99_ms, name
        assert one.load_per_s == 200.0
