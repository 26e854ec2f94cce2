"""The benchmark of the order of service on the real engine by a GPU's clock: its parts without an engine."""

from __future__ import annotations

import importlib
from types import ModuleType

import numpy as np
import pytest

from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.spec import WorkloadSpec


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from pathlib import Path

    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("engine_clock")


def test_ends_are_counted_between_the_quarters(benchmark: ModuleType) -> None:
    steady, tail = [10.0, 11.0, 12.0, 13.0], [0.0, 100.0]
    assert benchmark.between_quarters(np.array([*tail, *steady])) == pytest.approx(1.0)


def test_lengths_are_scaled_and_not_made_alike(benchmark: ModuleType) -> None:
    """Dropping what is long, as an earlier version did, halves the dispersion of what a request holds for how long."""
    full = WorkloadSpec(source="sharegpt-like", num_requests=2000, rate_per_s=1.0, max_model_len=4096)
    held = []
    for requests in (benchmark.requests_of(2000, [0], 1.0)[benchmark.WARM :], [*build(full).start()]):
        lengths = np.array([(one.prompt_tokens, one.output_tokens) for one in requests], dtype=float)
        kv_time = lengths[:, 1] * (lengths[:, 0] + lengths[:, 1] / 2)
        held.append((lengths[:, 1].mean(), kv_time.std() / kv_time.mean()))
    (mean, spread), (full_mean, full_spread) = held
    assert mean / full_mean == pytest.approx(benchmark.SCALE, rel=0.1)
    assert spread == pytest.approx(full_spread, rel=0.2)


def test_seeds_come_one_after_the_other_behind_a_history(benchmark: ModuleType) -> None:
    requests = benchmark.requests_of(5, [3, 1003], 2.0)
    assert len({one.req_id for one in requests}) == len(requests) == benchmark.WARM + 10
    slots = [int(one.arrival_s // benchmark.SLOT_S) for one in requests]
    assert slots == [0] * benchmark.WARM + [1] * 5 + [2] * 5
    assert [one.req_id.partition("-")[0] for one in requests[benchmark.WARM :]] == ["3"] * 5 + ["1003"] * 5
    assert all(one.prompt_tokens + one.max_tokens == benchmark.MAX_LEN for one in requests)


def test_the_simulator_serves_the_same_requests(benchmark: ModuleType) -> None:
    requests = benchmark.requests_of(20, [0], 5.0)
    found = benchmark.simulated(benchmark.ROWS["alise"], requests)
    assert found.arrival_s.tolist() == [one.arrival_s for one in requests]
    assert found.prompt_tokens.tolist() == [one.prompt_tokens for one in requests]
    assert found.output_tokens.tolist() == [min(one.output_tokens, one.max_tokens) for one in requests]
    assert (found.ttft_s > 0).all()
    assert (found.e2e_s >= found.ttft_s).all()


def test_each_seed_is_measured_by_itself_and_without_the_history(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "on_engine", benchmark.simulated)
    both = benchmark.cell("vLLM, other seeds", 10, 5.0, [0, 1])["measures"]
    alone = benchmark.cell("vLLM, other seeds", 10, 5.0, [1])["measures"]
    assert both[benchmark.ENGINE] == both[benchmark.SIMULATOR]
    assert both[benchmark.ENGINE][1] == pytest.approx(alone[benchmark.ENGINE][0], rel=1e-6)
    assert both[benchmark.ENGINE][0] != both[benchmark.ENGINE][1]
    assert set(benchmark.SHOWN) <= both[benchmark.ENGINE][0].keys()


def test_the_simulator_is_held_to_the_engine(benchmark: ModuleType) -> None:
    values = {"load_1.mean e2e_s": 2.0, "load_1.simulated mean e2e_s": 2.2}
    values |= {"load_1.P99 e2e_s": 10.0, "load_1.simulated P99 e2e_s": 10.9}
    assert [(claim.value, claim.met) for claim in benchmark.agreement(values, "alise", 1.0)] == [
        (0.1, False),
        (0.09, True),
    ]
