"""What a server carries by lengths alone: by hand where each limit binds, and beside a run."""

from __future__ import annotations

from typing import Any

import pytest

import vllm_ext
from vllm_ext.simulation.plan.estimate import estimate
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.workloads.build import build

STEP_S = 0.02


def spec(**engine: Any) -> SimulationSpec:
    """Requests of 100 prompt and 50 output tokens on a server whose steps all take 20 ms."""
    return SimulationSpec.model_validate({
        "engine": {"system": "upstream-fcfs", "max_model_len": 512, "num_blocks": 200, **engine},
        "cost": {"kind": "constant", "step_s": STEP_S},
        "workload": {"source": "fixed:100:50", "rate_per_s": 40.0,
                     "num_requests": 400},
    })  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "per_step"),
    [
        ({}, 200 * 16 / (100 * 50 + 50 * 50 / 2)),  # KV
        ({"max_num_seqs": 5}, 5 / 50),
        ({"max_num_seqs": 16, "max_num_batched_tokens": 30, "num_blocks": 2000}, 30 / 150),
    ],
)
def test_what_binds_is_kv_seats_or_the_token_budget(engine: dict[str, Any], per_step: float) -> None:
    base = spec(**engine)
    found = estimate(base, build(base.workload))
    assert (found.prompt_tokens, found.output_tokens) == (100, 50)
    assert found.rate_per_s == pytest.approx(per_step / STEP_S)


def test_outputs_end_where_the_server_ends_them() -> None:
    base = spec(max_model_len=120)
    assert estimate(base, build(base.workload)).output_tokens == 20


@pytest.mark.parametrize("engine", [{}, {"max_num_seqs": 5}])
def test_a_run_that_asks_for_more_is_served_about_as_much(engine: dict[str, Any]) -> None:
    base = spec(**engine)
    served = vllm_ext.simulate(base.model_dump()).metrics["throughput_requests_per_s"]
    assert estimate(base, build(base.workload)).rate_per_s == pytest.approx(served, rel=0.15)
