"""What the real engine's scheduler decided is what the simulator's decides: async, short of memory, behind a cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import BASE_ENGINE, EAGER, TIGHT, Engines, conversations, long_then_short
from forks import ENVIRONMENT

from vllm_ext.simulation.recorded import recording
from vllm_ext.simulation.recorded.recording import EngineSettings, Header
from vllm_ext.simulation.recorded.replay import replay

pytestmark = pytest.mark.e2e
RECORD_RUN = Path(__file__).parents[2] / "benchmarks" / "engine" / "record_run.py"

_SYSTEMS: dict[str, dict[str, Any]] = {
    "upstream": {},
    "alise": {"scheduler_cls": "alise-published", "additional_config": EAGER},
}


def _run(name: str, model: Path, arrivals: list[dict[str, Any]], system: str) -> dict[str, Any]:
    engine = {**BASE_ENGINE, "model": str(model), **TIGHT, **_SYSTEMS[system]}
    return {"name": name, "engine": engine, "arrivals": arrivals, "record": True}


@pytest.mark.parametrize("system", _SYSTEMS)
@pytest.mark.parametrize("boot", ["plain", "async"])
def test_recorded_runs_are_decided_again_in_virtual_time(
    boot: str, system: str, run_engines: Engines, llama: Path, tmp_path: Path
) -> None:
    traces = {"memory": long_then_short(seed=5), "cache": conversations(seed=6, user_tokens=40, answer_tokens=20)}
    runs = [_run(name, llama, arrivals, system) for name, arrivals in traces.items()]
    outcomes = run_engines(runs, boot=boot)
    assert outcomes["memory"].preemptions > 0, "memory was not short"
    assert {outcome.batch_queue for outcome in outcomes.values()} == {2 if boot == "async" else 1}
    for name, outcome in outcomes.items():
        path = tmp_path / f"{name}.jsonl"
        header = Header(
            system=system, load=0.0, repeat=0, model="tiny", versions={}, client_start_s=0.0, facts={},
            settings=EngineSettings(**outcome.record["settings"]),
        )  # fmt: skip
        recording.append(path, header, outcome.record["lines"], [], dropped=outcome.record["dropped"])
        (run,) = recording.read(path)
        found = replay(run)
        assert found.divergence is None, found.divergence
        assert found.steps > 50


@pytest.mark.full
def test_what_the_command_records_is_decided_again(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    workload = "--source alpaca-like --set scale_output=0.2 --set system_prompt_tokens=64 --num-requests 12 --warm-up 3"
    flags = "--dtype float32 --enforce-eager --max-model-len 512 --max-num-seqs 4 --block-size 32"
    memory = "--num-gpu-blocks-override 24 --kv-cache-memory-bytes 33554432"
    command = f"{path} --model {llama} --systems alise --rate 50 {workload} -- {flags} {memory}"
    subprocess.run([sys.executable, RECORD_RUN, *command.split()], check=True, env={**os.environ, **ENVIRONMENT})
    (run,) = recording.read(path)
    settings = run.header.settings
    assert (settings.system, settings.num_blocks, settings.max_num_seqs) == ("alise", 24, 4)
    assert len([*run.of_type(recording.Add)]) == 1 + 3 + 12
    assert [len(one.token_times_s) for one in run.requests] == [one.output_tokens for one in run.requests]
    assert len(run.requests) == 12
    assert len({one.prompt[:64] for one in run.of_type(recording.Add)}) == 2, "one goes before, and shares nothing"
    found = replay(run)
    assert found.divergence is None, found.divergence
    assert found.steps > 12
