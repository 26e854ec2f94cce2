"""`vllm_ext.simulate`: a run from Python, with DataFrames."""

from __future__ import annotations

import subprocess
import sys

import pytest

import vllm_ext
from tests.support.extent import HANG_S

SPEC = {
    "engine": {"system": "alise", "max_num_seqs": 2, "num_blocks": 9, "max_model_len": 64},
    "cost": {"kind": "constant"},
    "workload": {"source": "fixed:20:8", "num_requests": 12, "rate_per_s": 20.0},
}


def test_requests_are_those_of_the_metrics() -> None:
    found = vllm_ext.simulate(SPEC)
    assert len(found.requests) == found.metrics["requests"] == 12
    assert found.requests["ttft_s"].mean() * 1000 == pytest.approx(found.metrics["ttft_mean_ms"])


def test_steps_add_up_to_the_runs_counters() -> None:
    found = vllm_ext.simulate(SPEC)
    steps, metrics = found.steps, found.metrics
    assert len(steps) == metrics["steps"] - metrics["empty_steps"]
    assert steps["prefill_tokens"].sum() + steps["decode_tokens"].sum() == (
        metrics["prefill_tokens"] + metrics["decode_tokens"]
    )
    assert (steps["end_s"] - steps["start_s"]).sum() == pytest.approx(metrics["device_busy_s"])


def test_run_with_more_steps_than_were_kept_warns() -> None:
    found = vllm_ext.simulate(SPEC, set={"record.events": 5})
    with pytest.warns(UserWarning, match=r"only the first 5 steps are there; raise record\.events"):
        assert len(found.steps) == 5


def test_wrong_field_is_named_with_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"workload\.rate=2.*rate_per_s"):
        vllm_ext.simulate({"workload": {"rate": 2}})
    with pytest.raises(ValueError, match=r"engine\.options\.policies='x\.py'"):
        vllm_ext.simulate(SPEC, policy="x.py")


def test_importing_the_package_imports_neither_vllm_nor_pandas() -> None:
    program = (
        "import sys, vllm_ext\nsys.exit(str([m for m in ('vllm', 'torch', 'pandas', 'numpy') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.stderr.strip() == "[]"
