"""What a server carries by lengths alone: by hand where each limit binds, and beside a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import vllm_ext
from vllm_ext.simulation.plan.estimate import Estimate, estimate
from vllm_ext.simulation.spec import SimulationSpec, with_values
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


def estimated(base: SimulationSpec) -> Estimate:
    found = estimate(base, build(base.workload))
    assert found is not None
    return found


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
    found = estimated(base)
    assert (found.prompt_tokens, found.output_tokens) == (100, 50)
    assert found.rate_per_s == pytest.approx(per_step / STEP_S)


def test_outputs_end_where_the_server_ends_them() -> None:
    base = spec(max_model_len=120)
    assert estimated(base).output_tokens == 20


@pytest.mark.parametrize("engine", [{}, {"max_num_seqs": 5}])
def test_a_run_that_asks_for_more_is_served_about_as_much(engine: dict[str, Any]) -> None:
    base = spec(**engine)
    served = vllm_ext.simulate(base.model_dump()).metrics["throughput_requests_per_s"]
    assert estimated(base).rate_per_s == pytest.approx(served, rel=0.15)


def test_prompts_that_the_server_refuses_count_for_nothing(tmp_path: Path) -> None:
    rows = [(100, 50), (900, 50)] * 40
    path = tmp_path / "lengths.jsonl"
    path.write_text("".join(f'{{"prompt_tokens": {p}, "output_tokens": {o}}}\n' for p, o in rows), encoding="utf-8")
    base = with_values(spec(), {"workload.source": str(path), "workload.num_requests": None})
    assert estimated(base) == estimated(spec())
    small = with_values(base, {"engine.max_model_len": 64})
    assert estimate(small, build(small.workload)) is None
