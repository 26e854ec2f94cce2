"""What the real engine's scheduler decided is what the simulator's decides: async, short of memory, behind a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import BASE_ENGINE, EAGER, TIGHT, Engines, conversations, long_then_short

from vllm_ext.simulation.recorded import recording
from vllm_ext.simulation.recorded.recording import EngineSettings, Header
from vllm_ext.simulation.recorded.replay import replay

pytestmark = pytest.mark.e2e

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
