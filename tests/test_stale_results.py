"""Which results of papers' figures are of other sources, and whether a run comes out again."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.experiments.catalogue import experiments
from vllm_ext.experiments.evidence import DECIDED_BY, SAMPLE, Evidence
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep.store import Outcome
from vllm_ext.simulation.workloads.spec import WorkloadSpec

SPEC = SimulationSpec(workload=WorkloadSpec(source="fixed:20:4", num_requests=3), record={"token_times": False})


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    monkeypatch.delitem(sys.modules, "stale_results", raising=False)
    found = import_module("stale_results")
    monkeypatch.setattr(found, "ROOT", tmp_path)
    return found


def kept(folder: Path, **changed: float) -> Path:
    from vllm_ext.simulation.sweep.pools import simulate_point

    noted = Evidence()
    noted.add(SPEC, Outcome(metrics=simulate_point(SPEC), modules=("simulation/run.py",)))
    config = noted.config(experiments()["alise-fig9"])
    config[SAMPLE]["metrics"] |= changed
    file = folder / "benchmarks" / "results" / "repro" / "alise-fig9.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"config": config}))
    return file


def test_result_of_these_sources_stands_and_its_run_comes_out_again(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(tmp_path)
    assert script.main(["--repeat"]) == 0
    assert "0 of 1 figures are of other sources: -" in capsys.readouterr().out


def test_metric_that_comes_out_differently_is_named(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(tmp_path, requests=7.0)
    assert script.main(["--repeat"]) == 1
    assert "alise-fig9: requests was 7.0, and is 3.0: measure it again" in capsys.readouterr().out


def test_result_of_other_sources_and_one_that_says_nothing_are_listed(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = kept(tmp_path)
    result = json.loads(file.read_text())
    result["config"][DECIDED_BY]["sources"] = "another"
    file.write_text(json.dumps(result))
    file.with_name("alise-fig6.json").write_text('{"config": {}}')
    assert script.main([]) == 0
    assert "2 of 2 figures are of other sources: alise-fig6, alise-fig9" in capsys.readouterr().out
