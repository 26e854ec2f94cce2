"""What decided a result."""

from __future__ import annotations

import json

import pytest

from vllm_ext.experiments import evidence
from vllm_ext.experiments.catalogue import experiments
from vllm_ext.experiments.evidence import DECIDED_BY, SAMPLE, Evidence, imported, stale
from vllm_ext.simulation.spec import SimulationSpec, with_values
from vllm_ext.simulation.sweep.sources import all_files, checksums
from vllm_ext.simulation.sweep.store import Outcome

ALISE = "experiments/papers/alise.py"


def test_experiment_is_decided_by_its_runs_modules_and_by_its_own() -> None:
    noted = Evidence()
    noted.add(SimulationSpec(), Outcome(metrics={"steps": 2.0}, modules=("scheduling/scheduler.py",)))
    modules = noted.config(experiments()["alise-fig9"])[DECIDED_BY]["modules"]
    assert {"scheduling/scheduler.py", ALISE, "experiments/papers/alise_latency.py", "experiments/runner.py"} <= {
        *modules
    }
    assert not any("pensieve" in name or name.startswith("cli/") for name in modules)


def test_cells_are_decided_by_the_models_of_cells() -> None:
    assert {"cellular/cells.py", "cellular/scheduler.py"} <= imported("vllm_ext.experiments.papers.batchmaker")


def test_result_is_stale_once_a_module_that_decided_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Evidence()
    noted.add(SimulationSpec(), Outcome(metrics={"steps": 2.0}, modules=("scheduling/scheduler.py",)))
    result = {"config": json.loads(json.dumps(noted.config(experiments()["alise-fig9"])))}
    assert stale(result) is False
    sums = checksums(all_files())
    monkeypatch.setattr(evidence, "_now", lambda: {**sums, "experiments/papers/pensieve.py": "changed"})
    assert stale(result) is False
    monkeypatch.setattr(evidence, "_now", lambda: {**sums, ALISE: "changed"})
    assert stale(result) is True
    assert stale({"config": {}}) is None


def test_shortest_run_is_kept_with_what_it_takes_to_repeat_it() -> None:
    noted = Evidence()
    for seed, steps in ((1, 9.0), (2, 3.0), (3, 5.0)):
        noted.add(with_values(SimulationSpec(), {"workload.seed": seed}), Outcome(metrics={"steps": steps}))
    noted.add(SimulationSpec(), Outcome(error="RuntimeError: no"))
    kept = noted.config(experiments()["alise-fig9"])[SAMPLE]
    assert SimulationSpec.model_validate(kept["spec"]).workload.seed == 2
    assert kept["metrics"] == {"steps": 3.0}


def test_a_run_that_reads_a_file_is_not_kept_to_be_repeated() -> None:
    """Its path would be one of this machine, which no result may hold."""
    noted, plain = Evidence(), SimulationSpec()
    noted.add(with_values(plain, {"workload.source": "/data/x.csv"}), Outcome(metrics={"steps": 1.0}, modules=("a",)))
    mix = [{"source": "alpaca-vllm"}, {"source": "/data/x.csv", "sample": "with-replacement"}]
    noted.add(with_values(plain, {"workload.mix": mix}), Outcome(metrics={"steps": 2.0}))
    assert SAMPLE not in noted.config(experiments()["alise-fig9"])
    noted.add(plain, Outcome(metrics={"steps": 3.0}))
    assert noted.config(experiments()["alise-fig9"])[SAMPLE]["metrics"] == {"steps": 3.0}
