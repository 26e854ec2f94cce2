"""The benchmark of the simulator's accuracy, without engines: what it records, and what it makes of that."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.simulation.cost.fitted import Fitted
from vllm_ext.simulation.recorded import recording

from .recorded_runs import simulate

BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "engine"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, with simulated engines in the place of real ones; ``asked`` are the runs it wanted."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("simulator_validation")
    script.asked = []

    def record(args: argparse.Namespace) -> float:
        script.asked.append(args)
        for repeat in range(args.repeats):
            for system in args.systems.split(","):
                seed = vars(args)["workload.seed"]
                simulate(args.recording, monkeypatch, Fitted.constant(0.01), system=system, seed=seed, repeat=repeat)
        return 30.0

    monkeypatch.setattr(script.record_run, "record", record)
    return script


def result_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_full_run_fits_on_other_requests_and_repeats_those_it_judges(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark.main(["--keep", str(tmp_path), "--loads", "0.5", "--", "--dtype", "bfloat16"])
    fitted, judged = map(vars, benchmark.asked)
    assert "workload.rate_per_s" not in fitted
    assert judged["workload.rate_per_s"] == 30.0
    assert (fitted["repeats"], judged["repeats"], judged["loads"]) == (1, 2, [0.5])
    assert fitted["workload.seed"] != judged["workload.seed"] == 0
    assert judged["passed"] == [*benchmark.LARGER, "--dtype", "bfloat16"]
    result = result_of(capsys)
    assert result["config"]["fitted_on"] == "fit.jsonl.gz"
    assert result["metrics"]["alise.load_0.8.replayed_equal_steps_fraction"] == 1.0
    assert "another run of the real engine" in result["baselines"]
    judged = [goal for goal in result["claims"] if not goal["name"].startswith("fitted on its own")]
    assert {goal["name"]: goal["value"] for goal in judged if not goal["met"]} == {}
    assert len(judged) == 6
    assert len(recording.read(tmp_path / "validate.jsonl.gz")) == 4
    own_half = result["baselines"]["fitted on its own first half"]
    assert own_half["alise.load_0.8.judged_requests"] < result["metrics"]["alise.load_0.8.judged_requests"]
    assert {goal["name"] for goal in result["claims"]} > {
        "all.e2e_error_median",
        "fitted on its own first half: all.ttft_error_median",
    }


def test_kept_recordings_are_judged_again_without_an_engine(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark.main(["--keep", str(tmp_path), "--loads", "0.5"])
    first = result_of(capsys)
    benchmark.asked.clear()
    benchmark.main(["--from", str(tmp_path)])
    again = result_of(capsys)
    assert not benchmark.asked
    assert (again["metrics"], again["claims"]) == (first["metrics"], first["claims"])


def test_quick_run_takes_one_engine_and_judges_its_second_half(
    benchmark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark.main(["--quick"])
    (asked,) = map(vars, benchmark.asked)
    assert (asked["systems"], asked["repeats"], asked["loads"]) == ("upstream-fcfs", 1, [0.8])
    assert (asked["workload.rate_per_s"], asked["passed"]) == (20.0, []), "nothing is measured first"
    assert result_of(capsys)["config"]["fitted_on"] == "the first half of each run, in time"


def test_a_setting_brings_its_flags_and_name(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark.main(["--setting", "tier", "--keep", str(tmp_path), "--systems", "alise", "--", "--kv-tier-gib", "1"])
    for asked in map(vars, benchmark.asked):
        assert (asked["systems"], asked["workload.source"]) == ("alise", "pensieve-sharegpt")
        assert asked["passed"] == [*benchmark.LARGER, *benchmark.SETTINGS["tier"][1], "--kv-tier-gib", "1"]
    assert result_of(capsys)["name"] == "simulator_validation_tier"
