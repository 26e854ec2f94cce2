"""The examples of the documentation do what the pages say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_ext import systems
from vllm_ext.config import ConfigError, parse
from vllm_ext.contract import RequestView
from vllm_ext.simulation.run import simulate
from vllm_ext.simulation.spec import EngineSpec, SimulationSpec
from vllm_ext.simulation.workloads.spec import WorkloadSpec
from vllm_ext.systems import compose

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture
def response_ratio(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's module, with the table as it was afterwards."""
    monkeypatch.setattr(compose, "_SYSTEMS", dict(compose._SYSTEMS))
    spec = importlib.util.spec_from_file_location("response_ratio", EXAMPLES / "response_ratio.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module's names.
    monkeypatch.setitem(sys.modules, "response_ratio", module)
    spec.loader.exec_module(module)
    return module


def test_highest_response_ratio_goes_first_and_long_ones_catch_up(response_ratio: Any) -> None:
    policy = response_ratio.ResponseRatio()
    short = RequestView("short", 0.0, 10, predicted_remaining_s=1.0, waiting_since=90.0)
    long = RequestView("long", 0.0, 10, predicted_remaining_s=100.0, waiting_since=90.0)
    assert policy.rank(short, 100.0).key < policy.rank(long, 100.0).key
    old = long._replace(waiting_since=-2000.0)
    assert policy.rank(old, 100.0).key < policy.rank(short, 100.0).key
    assert policy.rank(short, 100.0).until_s == 101.0


def test_the_example_serves_and_its_parameter_is_an_option(response_ratio: Any) -> None:
    engine = EngineSpec(system="response-ratio", options={"ordering": {"refresh_s": 0.5}}, max_num_seqs=4)
    workload = WorkloadSpec(source="alpaca-like", num_requests=40, rate_per_s=20.0, seed=1)
    data = simulate(SimulationSpec(engine=engine, workload=workload))
    assert [row["finish_reason"] for row in data.requests.rows()] == ["stop"] * 40
    assert data.counters["policy_fallbacks"] == 0
    with pytest.raises(ConfigError, match=r"ordering.refresh_s=0"):
        systems.build(parse({"system": "response-ratio", "ordering": {"refresh_s": 0}}))
