"""The benchmark of the order of service on the real engine by a GPU's clock: its parts without an engine."""

from __future__ import annotations

import importlib
import math
from types import ModuleType, SimpleNamespace

import pytest


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from pathlib import Path

    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("engine_clock")


def test_a_step_has_the_shape_that_the_cost_model_asks_for(benchmark: ModuleType) -> None:
    step = SimpleNamespace(
        num_scheduled_tokens={"decode": 1, "prompt": 10, "chunk": 4},
        scheduled_new_reqs=[SimpleNamespace(req_id="prompt", num_computed_tokens=0)],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["decode", "chunk"], num_computed_tokens=[99, 20], resumed_req_ids=()
        ),
        preempted_req_ids=None,
    )
    shape = benchmark.shape_of(step)
    assert (shape.num_requests, shape.num_tokens, shape.num_decodes) == (3, 15, 1)
    assert (shape.decode_context_tokens, shape.prefill_context_tokens) == (100, 34)
    assert shape.prefill_pairs == 55 + sum(20 + i for i in range(1, 5))


def test_measures_are_of_what_clients_see(benchmark: ModuleType) -> None:
    rows = [
        {"arrival": 1.0, "first": 2.0, "end": 3.0, "tokens": 20},
        {"arrival": 1.0, "first": 7.0, "end": 9.0, "tokens": 80},
    ]
    found = benchmark.measures(rows)
    assert (found["mean e2e"], found["mean TTFT"], found["mean normalised"]) == pytest.approx((5.0, 3.5, 0.1))
    assert found["share on time"] == 0.5


def test_above_1_is_better_and_one_seed_has_no_interval(benchmark: ModuleType) -> None:
    assert benchmark.compared([2.0], [4.0]) == pytest.approx((2.0, 2.0, 2.0))
    middle, low, high = benchmark.compared([1.0, 1.0], [2.0, 8.0])
    assert middle == pytest.approx(4.0)
    assert math.log(high / middle) == pytest.approx(12.706 * math.log(4) / 2, rel=1e-3)  # t of 1 degree of freedom
    assert low * high == pytest.approx(16.0)
