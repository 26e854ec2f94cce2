"""The harness of reproductions, with a made-up study and a made-up simulator."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from vllm_ext.cli import repro as command
from vllm_ext.config import ConfigError
from vllm_ext.simulation.repro import catalogue, report
from vllm_ext.simulation.repro.bench import Bench, Limit, RunFailed
from vllm_ext.simulation.repro.study import Claim, Findings, Study
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep.pools import InProcessPool
from vllm_ext.simulation.sweep.store import PointStore
from vllm_ext.simulation.workloads.spec import WorkloadSpec

CAPACITY_PER_S = 10.0
LIMIT = Limit(metric="latency_ms", value=100.0)
FOLDER = Path(__file__).parents[3] / "benchmarks" / "repro"


def hyperbola(spec: SimulationSpec) -> Mapping[str, float]:
    """Latency of a queue with the capacity above: 10 ms / (1 - load), 1e6 ms from saturation on."""
    load = (spec.workload.rate_per_s or 0.0) / CAPACITY_PER_S
    return {"latency_ms": 10 / (1 - load) if load < 1 else 1e6}


def failing(spec: SimulationSpec) -> Mapping[str, float]:
    raise ValueError("no such device")


def bench(folder: Path, evaluate: Callable[[SimulationSpec], Mapping[str, float]] = hyperbola) -> Bench:
    return Bench(quick=True, seed=0, pool=InProcessPool(evaluate), store=PointStore(folder))


def at(rate: float, seed: int = 0) -> SimulationSpec:
    return SimulationSpec(workload=WorkloadSpec(rate_per_s=rate, seed=seed))


def claim(paper: float = 2.0, ours: float = 3.0, **other: object) -> Claim:
    return Claim(**{"name": "rate ratio", "paper": paper, "ours": ours, "note": "a reason", **other})  # type: ignore[arg-type]


def findings(*claims: Claim) -> Findings:
    return Findings(
        header=("system", "req/s"),
        rows=[("ours", 3.0)],
        claims=claims,
        metrics={"ours.rate_per_s": 3.0},
        workload_name="made up",
        workload_rows=0,
        workload_sha256="0" * 64,
    )


STUDY = Study(
    id="made-up", paper="A Paper", title="A table", differences=("no GPU",), run=lambda bench: findings(claim())
)


@pytest.mark.parametrize("start", [1.0, 9.0, 50.0])
def test_crossing_is_found_from_either_side(tmp_path: Path, start: float) -> None:
    found = bench(tmp_path).crossings({"a": at}, LIMIT, start_per_s={"a": start}, tolerance=0.02)["a"]
    assert found.rate_per_s == pytest.approx(9.0, rel=0.02)  # 10 / (1 - 0.9) = 100
    rates = [rate for rate, _ in found.trials]
    assert rates == sorted(rates)
    lowest, highest = (found.trials[end][1]["latency_ms"] for end in (0, -1))
    assert lowest <= LIMIT.value < highest


def test_limit_that_no_rate_crosses_is_an_error_that_names_the_system(tmp_path: Path) -> None:
    hopeless = Limit(metric="latency_ms", value=1.0)
    with pytest.raises(RunFailed, match="slow: latency_ms<=1 is never met"):
        bench(tmp_path).crossings({"slow": at}, hopeless, start_per_s={"slow": 1.0}, tolerance=0.1)


def test_failed_simulation_ends_the_reproduction_with_its_message(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="x: ValueError: no such device"):
        bench(tmp_path, failing).metrics({"x": at(1.0)})


def test_metrics_come_back_under_their_keys_and_are_not_simulated_twice(tmp_path: Path) -> None:
    seen: list[float | None] = []

    def counting(spec: SimulationSpec) -> Mapping[str, float]:
        seen.append(spec.workload.rate_per_s)
        return hyperbola(spec)

    specs = {rate: at(rate) for rate in (1.0, 5.0)}
    first = bench(tmp_path, counting).metrics(specs)
    again = bench(tmp_path, counting).metrics(specs)
    assert first == again == {1.0: {"latency_ms": pytest.approx(11.11, rel=1e-3)}, 5.0: {"latency_ms": 20.0}}
    assert seen == [1.0, 5.0]


@pytest.mark.parametrize(
    ("better", "paper", "ours", "reached"),
    [("higher", 2.0, 2.0, True), ("higher", 2.0, 1.9, False), ("lower", 2.0, 1.9, True), ("lower", 2.0, 2.1, False)],
)
def test_claim_is_reached_in_the_direction_that_is_better(
    better: str, paper: float, ours: float, reached: bool
) -> None:
    made = claim(paper, ours, better=better)
    assert made.reached is reached
    assert made.ratio == ours / paper


def test_headline_claims_are_goals_and_a_missed_one_keeps_its_reason() -> None:
    made = report.result(
        STUDY, findings(claim(headline=True), claim(4.0, 3.0, headline=True)), command="x", seed=0, quick=True
    )
    assert [(goal.met, goal.note) for goal in made.goals] == [(True, "a reason"), (False, "a reason")]
    assert [c["reached"] for c in made.config["claims"]] == [True, False]


def test_documentation_shows_paper_ours_and_ratio_of_each_result(tmp_path: Path) -> None:
    for name, ours in (("a", 3.0), ("b", 1.0)):
        made = report.result(STUDY, findings(claim(ours=ours)), command="vllm-ext repro x", seed=0, quick=ours == 1.0)
        (tmp_path / f"{name}.json").write_text(made.to_json(), encoding="utf-8")
    text = report.documentation(list(tmp_path.glob("*.json")))
    assert "| rate ratio | 2 | 3 | 1.50 | yes |" in text
    assert "| rate ratio | 2 | 1 | 0.50 | no: a reason |" in text
    assert text.count("Measured with `--quick`") == 1
    assert "- no GPU" in text


def test_documentation_of_something_else_is_refused_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"config": {}}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"other\.json is not the result of a reproduction"):
        report.documentation([tmp_path / "other.json"])


def test_every_file_of_the_repository_defines_one_study_with_its_paper_and_differences() -> None:
    found = catalogue.studies(FOLDER)
    assert {"alise-fig6", "alise-fig9", "alise-table3"} <= found.keys()
    assert {"past-future-fig7", "past-future-fig8", "past-future-table1"} <= found.keys()
    files = [file for file in FOLDER.glob("*.py") if not file.name.startswith("_")]
    assert len(found) == len(files)
    for study in found.values():
        assert study.paper
        assert study.differences


def test_file_without_a_study_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("x = 1", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"a Study, in empty\.py"):
        catalogue.studies(tmp_path)


def test_list_shows_ids_and_an_unknown_id_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list", "--dir", str(FOLDER)]) == 0
    assert "alise-fig6" in capsys.readouterr().out
    assert command.main(["nonsense", "--dir", str(FOLDER)]) == 2
    assert "alise-fig6" in capsys.readouterr().err


def test_run_writes_the_result_its_plots_and_one_json_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "study.py").write_text(_STUDY_FILE, encoding="utf-8")
    out = tmp_path / "result.json"
    arguments = ["tiny", "--dir", str(tmp_path), "--out", str(out), "--cache", str(tmp_path / "cache"), "--jobs", "1"]
    assert command.main([*arguments, "--quick"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert result == json.loads(out.read_text(encoding="utf-8"))
    assert result["metrics"]["requests"] == 3
    assert result["config"]["quick"] is True
    assert "paper" in printed.err
    assert (tmp_path / "result-curve.png").read_bytes() == b"picture"


_STUDY_FILE = """
from vllm_ext.simulation.cost.spec import CostSpec
from vllm_ext.simulation.repro.study import Claim, Findings, Plot, Study
from vllm_ext.simulation.spec import EngineSpec, SimulationSpec
from vllm_ext.simulation.workloads.spec import WorkloadSpec

def run(bench):
    spec = SimulationSpec(
        engine=EngineSpec(num_blocks=200), cost=CostSpec(kind="constant"),
        workload=WorkloadSpec(source="fixed:16:4", num_requests=3),
    )
    metrics = bench.metrics({"x": spec})["x"]
    return Findings(
        header=("requests",), rows=[(metrics["requests"],)],
        claims=[Claim(name="requests", paper=3.0, ours=metrics["requests"])],
        metrics={"requests": metrics["requests"]},
        plots=[Plot(suffix="-curve", draw=lambda path: path.write_bytes(b"picture"))],
        workload_name="fixed", workload_rows=0, workload_sha256="0" * 64,
    )

STUDY = Study(id="tiny", paper="none", title="three requests", differences=("all",), run=run)
"""
