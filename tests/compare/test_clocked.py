"""An engine by a clock: what its steps take, and that the simulator says the same of the same requests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import vllm_ext
from vllm_ext.compare.clocked import shape_of
from vllm_ext.compare.replay import observed
from vllm_ext.compare.servers import Clocked, Row
from vllm_ext.demo.server import ServerError
from vllm_ext.simulation.cost.spec import CostSpec, HardwareSpec
from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.requests import all_requests
from vllm_ext.simulation.workloads.spec import WorkloadSpec
from vllm_ext.tiny_model import Style
from vllm_ext.tiny_model import build as build_model

LIMITS = {"max_model_len": 256, "block_size": 32, "max_num_seqs": 16, "max_num_batched_tokens": 256}
BLOCKS = 24


def test_a_step_has_the_shape_that_the_cost_model_asks_for() -> None:
    step = SimpleNamespace(
        num_scheduled_tokens={"decode": 1, "prompt": 10, "chunk": 4},
        scheduled_new_reqs=[SimpleNamespace(req_id="prompt", num_computed_tokens=0)],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["decode", "chunk"], num_computed_tokens=[99, 20], resumed_req_ids=()
        ),
        preempted_req_ids=None,
    )
    shape = shape_of(step)
    assert (shape.num_requests, shape.num_tokens, shape.num_decodes) == (3, 15, 1)
    assert (shape.decode_context_tokens, shape.prefill_context_tokens) == (100, 34)
    assert shape.prefill_pairs == 55 + sum(20 + i for i in range(1, 5))


def engine(folder: Path, *more: str) -> Clocked:
    flags = [word for name, value in LIMITS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--num-gpu-blocks-override", str(BLOCKS), "--kv-cache-memory-bytes", str(2**26), "--dtype", "float32"]
    return Clocked(
        str(build_model(Style.LLAMA)), [*flags, "--enforce-eager", *more], folder, HardwareSpec(), CostSpec()
    )


@pytest.mark.e2e
def test_the_simulator_says_the_same_of_the_same_requests(tmp_path: Path) -> None:
    """And a second workload begins where the first has ended."""
    with engine(tmp_path).started(Row("upstream")) as server:
        assert server.max_model_len == 256
        for seed in (1, 2):
            workload = WorkloadSpec(
                source="sharegpt-like", scale_prompt=0.2, scale_output=0.1, over_context="cut", num_requests=30,
                rate_per_s=20.0, seed=seed, max_model_len=256,
            )  # fmt: skip
            requests = list(build(workload).start())
            real = observed(server.serve(workload), requests)
            spec = {"engine": {"system": "upstream-fcfs", "num_blocks": BLOCKS, "async_scheduling": False, **LIMITS},
                    "workload": workload.model_dump(mode="json")}  # fmt: skip
            said = vllm_ext.simulate(spec).requests.set_index("req_id").loc[[one.req_id for one in requests]]
            assert real.failed == 0
            assert real.ttft_s == pytest.approx(said["ttft_s"].to_numpy(), rel=1e-6)
            assert real.e2e_s == pytest.approx(said["e2e_s"].to_numpy(), rel=1e-6)


@pytest.mark.e2e
def test_conversations_find_what_was_said_before(tmp_path: Path) -> None:
    """On the engine and in the simulator alike, and nothing of the run before."""
    workload = WorkloadSpec(
        source="pensieve-sharegpt", scale_prompt=0.1, scale_output=0.1, min_turns=2, max_turns=3, think_s=1.0,
        num_requests=8, rate_per_s=20.0, max_model_len=256,
    )  # fmt: skip
    requests = all_requests(build(workload))
    spec = {"engine": {"system": "upstream-fcfs", "num_blocks": BLOCKS, "async_scheduling": False, **LIMITS},
            "workload": workload.model_dump(mode="json")}  # fmt: skip
    said = vllm_ext.simulate(spec).requests.set_index("req_id").loc[[one.req_id for one in requests]]
    with engine(tmp_path).started(Row("upstream")) as server:
        for _ in range(2):
            found = server.serve(workload)
            real = observed(found, requests)
            assert real.failed == 0
            assert real.arrival_s == pytest.approx(said["arrival_s"].to_numpy(), rel=1e-6)
            assert real.e2e_s == pytest.approx(said["e2e_s"].to_numpy(), rel=1e-6)
            assert 0.1 < found["timeline"]["cached"] < 0.6


@pytest.mark.e2e
def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match="the engine ended; its last lines:"),
        engine(tmp_path, "--max-num-seqs", "0").started(Row("upstream")),
    ):
        pass
