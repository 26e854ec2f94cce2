"""The harness of reproductions, with a made-up experiment and a made-up simulator."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.cli import repro as command
from vllm_ext.experiments import catalogue, report
from vllm_ext.experiments.experiment import Experiment, Findings, Plot
from vllm_ext.experiments.runner import RunFailed, Runner, Sustained
from vllm_ext.report import common_flags, provenance
from vllm_ext.report.claim import PaperClaim, Reason
from vllm_ext.report.table import Table
from vllm_ext.simulation.cost.spec import CostSpec
from vllm_ext.simulation.spec import EngineSpec, SimulationSpec
from vllm_ext.simulation.sweep.pools import InProcessPool
from vllm_ext.simulation.sweep.store import PointStore
from vllm_ext.simulation.workloads.spec import WorkloadSpec

CAPACITY_PER_S = 10.0
LIMIT_MS = 100.0
ROOT = Path(__file__).parents[2]


def hyperbola(spec: SimulationSpec) -> Mapping[str, float]:
    """Latency of a queue with the capacity above: 10 ms / (1 - load), 1e6 ms from saturation on."""
    load = (spec.workload.rate_per_s or 0.0) / CAPACITY_PER_S
    return {"latency_ms": 10 / (1 - load) if load < 1 else 1e6}


def failing(spec: SimulationSpec) -> Mapping[str, float]:
    raise ValueError("no such device")


def runner(folder: Path, evaluate: Callable[[SimulationSpec], Mapping[str, float]] = hyperbola) -> Runner:
    return Runner(quick=True, seed=0, pool=InProcessPool(evaluate), store=PointStore(folder).__enter__())


def at(rate: float, seed: int = 0) -> SimulationSpec:
    return SimulationSpec(workload=WorkloadSpec(rate_per_s=rate, seed=seed))


def sustained(
    runner: Runner, specs: Mapping[str, Callable[[float], SimulationSpec]], start: float, latency_ms: float = LIMIT_MS
) -> dict[str, Sustained]:
    return runner.sustained(specs, {"latency_ms": latency_ms}, start_per_s=lambda _: start, tolerance=0.02)


REASONS = {"above": Reason("a larger device", "row `x`"), "below": Reason("a smaller device", "row `y`")}


def claim(paper: float = 2.0, ours: float = 3.0, **other: Any) -> PaperClaim:
    return PaperClaim(**{"name": "rate ratio", "goal": paper, "value": ours, "reasons": REASONS, **other})


def findings(*claims: PaperClaim) -> Findings:
    return Findings(
        tables=[Table(("system", "req/s"), [("ours", 3.0)])],
        claims=claims,
        metrics={"ours.rate_per_s": 3.0},
        workload=[WorkloadSpec(source="fixed:16:4", num_requests=3)],
    )


STUDY = Experiment(
    id="made-up",
    paper="A Paper",
    title="A table",
    row="upstream-fcfs",
    differences=("no GPU",),
    run=lambda runner: findings(claim()),
)


@pytest.mark.parametrize("start", [1.0, 9.0, 50.0])
def test_crossing_is_found_from_either_side(tmp_path: Path, start: float) -> None:
    found = sustained(runner(tmp_path), {"a": at}, start)["a"]
    assert found.crossing_per_s == pytest.approx(9.0, rel=0.02)  # 10 / (1 - 0.9) = 100
    assert found.rate_per_s <= found.crossing_per_s <= found.rate_per_s * 1.02
    rates = [rate for rate, _ in found.trials]
    assert rates == sorted(rates)
    lowest, highest = (found.trials[end][1]["latency_ms"] for end in (0, -1))
    assert lowest <= LIMIT_MS < highest


def test_limit_that_no_rate_crosses_is_an_error_that_names_the_system(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"slow: latency_ms<=1 is never met between 0\.001 and 10000 requests/s"):
        sustained(runner(tmp_path), {"slow": at}, 1.0, latency_ms=1.0)


def test_run_that_fails_leaves_those_beside_it_to_their_ends_and_all_that_failed_are_named(tmp_path: Path) -> None:
    seen: list[float | None] = []

    def some_fail(spec: SimulationSpec) -> Mapping[str, float]:
        seen.append(spec.workload.rate_per_s)
        return failing(spec) if spec.workload.rate_per_s in (1.0, 3.0) else hyperbola(spec)

    with pytest.raises(RunFailed, match=r"^1\.0: ValueError: no such device; 3\.0: ValueError: no such device$"):
        runner(tmp_path, some_fail).metrics({rate: at(rate) for rate in (1.0, 2.0, 3.0, 4.0)})
    assert seen == [1.0, 2.0, 3.0, 4.0]
    seen.clear()
    searches = {"bad": lambda rate: at(1.0), "good": at}
    with pytest.raises(RunFailed, match=r"^bad at 5 requests/s: ValueError: no such device$"):
        sustained(runner(tmp_path, some_fail), searches, 5.0)
    assert [rate for rate in seen if rate not in (1.0, 2.0, 3.0, 4.0)], "the good search went on"


def test_metrics_come_back_under_their_keys_and_are_not_simulated_twice(tmp_path: Path) -> None:
    seen: list[float | None] = []

    def counting(spec: SimulationSpec) -> Mapping[str, float]:
        seen.append(spec.workload.rate_per_s)
        return hyperbola(spec)

    specs = {rate: at(rate) for rate in (1.0, 5.0)}
    first = runner(tmp_path, counting).metrics(specs)
    again = runner(tmp_path, counting).metrics(specs)
    assert first == again == {1.0: {"latency_ms": pytest.approx(11.11, rel=1e-3)}, 5.0: {"latency_ms": 20.0}}
    assert seen == [1.0, 5.0]


def test_all_claims_are_kept_and_one_that_is_below_says_why() -> None:
    claims = (
        claim(headline=True),
        claim(4.0, 3.0),
        claim(4.0, 3.0, reasons={}, facts="a fact"),
        claim(4.0, 3.0, reasons={}),
    )
    made = report.result(STUDY, findings(*claims), command="x", seed=0, quick=True)
    assert [(one.headline, one.met, one.note) for one in made.claims] == [
        (True, True, ""),
        (False, False, "a smaller device"),
        (False, False, "a fact; the reason is not known"),
        (False, False, "the reason is not known"),
    ]


def test_documentation_shows_paper_ours_verdict_and_reason_of_each_result(tmp_path: Path) -> None:
    for name, ours in (("a", 3.0), ("b", 1.0)):
        made = report.result(STUDY, findings(claim(ours=ours)), command="vllm-ext repro x", seed=0, quick=False)
        (tmp_path / f"{name}.json").write_text(made.to_json(), encoding="utf-8")
    text = report.documentation(list(tmp_path.glob("*.json")))
    assert "| rate ratio | 2 | 3 | above | a larger device (row `x`) | - | - |" in text
    assert "| rate ratio | 2 | 1 | below | a smaller device (row `y`) | - | - |" in text
    made = report.result(STUDY, findings(claim(paper=0.0)), command="x", seed=0, quick=False)
    (tmp_path / "a.json").write_text(made.to_json(), encoding="utf-8")
    assert "| rate ratio | 0 | 3 | above |" in report.documentation([tmp_path / "a.json"])
    (tmp_path / "a.json").write_text(replace(made, config={**made.config, "quick": True}).to_json(), encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.json is not the result of a reproduction: .*no verdict"):
        report.documentation([tmp_path / "a.json"])
    assert "- no GPU" in text


@pytest.mark.parametrize("content", [b'{"config": {}}', b'{"config', b'{"\xff": 1}', b"[]"])
def test_documentation_of_something_else_is_refused_with_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"other\.json is not the result of a reproduction"):
        report.documentation([tmp_path / "other.json"])


def test_a_page_is_made_from_the_committed_results() -> None:
    files = list((ROOT / command.RESULTS).glob("*.json"))
    made = report.documentation(files, catalogue.experiments())
    assert [file.stem for file in files if f"## {file.stem}\n" not in made] == []


def test_page_names_commit_and_day_of_each_result_and_what_has_none(tmp_path: Path) -> None:
    made = report.result(STUDY, findings(claim()), command="vllm-ext repro x", seed=0, quick=False)
    made = replace(made, versions={"commit": "4e646e9", "committed": "2026-10-11"})
    (tmp_path / "a.json").write_text(made.to_json(), encoding="utf-8")
    text = report.documentation([tmp_path / "a.json"], ["c", "a", "b"])
    assert "`vllm-ext repro x`, commit 4e646e9, 2026-10-11." in text
    assert "to be measured again (`vllm-ext repro ID`): `b`, `c`." in text
    assert "Without a result" not in report.documentation([tmp_path / "a.json"], ["a"])


def test_page_is_made_in_a_checkout_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(["--document"]) == 3
    assert "run it in a checkout" in capsys.readouterr().err
    for folder in (command.RESULTS, command.DOCUMENT.parent):
        folder.mkdir(parents=True)
    made = report.result(STUDY, findings(claim()), command="vllm-ext repro x", seed=0, quick=False)
    (command.RESULTS / "a.json").write_text(made.to_json(), encoding="utf-8")
    assert command.main(["--document"]) == 0
    assert "## made-up" in command.DOCUMENT.read_text(encoding="utf-8")


def test_every_figure_and_table_is_listed_with_its_number_row_and_differences() -> None:
    found = catalogue.experiments()
    assert found.keys() >= {file.stem for file in (ROOT / command.RESULTS).glob("*.json")}
    for name, experiment in found.items():
        paper, _, figure = name.rpartition("-")
        kind, number = ("Figure", figure[3:]) if figure.startswith("fig") else ("Table", figure[5:])
        assert re.search(rf", {kind} ([23]\.)?{number}\b", experiment.paper), experiment.paper
        assert (experiment.id, experiment.row) == (name, f"{paper}-published")
        assert experiment.differences


def test_list_shows_ids_and_an_unknown_id_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    assert "alise-fig6" in capsys.readouterr().out
    assert command.main(["nonsense"]) == 2
    assert "alise-fig6" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--seed", "-1"), ("--jobs", "0"), ("--cache", __file__), ("--out-dir", __file__)])
def test_wrong_flag_is_one_line_and_status_2(flags: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["alise-fig6", *flags])
    assert capsys.readouterr().err.startswith(f"vllm-ext repro: argument {flags[0]}: {flags[1]}: ")


def three_requests(runner: Runner) -> Findings:
    spec = SimulationSpec(
        engine=EngineSpec(num_blocks=200),
        cost=CostSpec(kind="constant"),
        workload=WorkloadSpec(source="fixed:16:4", num_requests=3),
    )
    metrics = runner.metrics({"x": spec})["x"]
    return replace(
        findings(claim(ours=metrics["requests"])),
        metrics={"requests": metrics["requests"]},
        plots=[Plot(suffix="-curve", draw=_draw)],
    )


def _draw(path: Path) -> None:
    path.write_bytes(b"picture")


@pytest.fixture
def run_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs an experiment of three requests with the command."""
    experiment = replace(STUDY, id="tiny", run=three_requests)
    monkeypatch.setattr(catalogue, "experiments", lambda: {"tiny": experiment})
    return lambda *more: command.main(["tiny", "--cache", str(tmp_path / "cache"), "--jobs", "1", *more])


def test_run_writes_the_result_its_plots_and_one_json_line(
    run_one: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    assert run_one("--out", str(out)) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert result == json.loads(out.read_text(encoding="utf-8"))
    assert result["metrics"]["requests"] == 3
    assert result["config"]["quick"] is False
    assert [claim["met"] for claim in result["claims"]] == [True]
    assert "paper" in printed.err
    assert (tmp_path / "result-curve.png").read_bytes() == b"picture"


def test_a_quick_run_says_nothing_of_the_paper(
    run_one: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert run_one("--quick", "--html", str(page)) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert (result["claims"], result["config"]["quick"]) == ([], True)
    assert "vllm-ext repro tiny --quick" in page.read_text(encoding="utf-8")
    for shown in (printed.err, page.read_text(encoding="utf-8")):
        assert "no verdict: the traces of --quick are too short" in shown
        assert "rate ratio" not in shown


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Has one data set, of two lengths."""
    made = tmp_path / "data"
    made.mkdir()
    (made / "alpaca.csv").write_text("num_prefill_tokens,num_decode_tokens\n16,4\n18,5\n", encoding="utf-8")
    return made


def test_nothing_is_of_real_lengths_where_a_figure_serves_no_file(
    run_one: Callable[..., int], tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figures of the cost model printed their values once more as those of real lengths."""
    page = tmp_path / "page.html"
    assert run_one("--data", str(folder), "--html", str(page)) == 0
    printed = capsys.readouterr()
    for shown in (printed.err, page.read_text(encoding="utf-8")):
        assert "no real lengths: this figure serves no data set of the folder of --data" in shown
        assert ", real lengths" not in shown
    result = json.loads(printed.out.splitlines()[-1])
    assert [*result["metrics"]] == ["requests"]
    assert len(result["claims"]) == 1
    assert printed.err.count(": run ") == 1, "drawn lengths are not served a second time"


def test_real_lengths_stand_beside_drawn_ones_under_the_name_of_their_file(
    run_one: Callable[..., int], monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def two(runner: Runner) -> Findings:
        spec = SimulationSpec(
            engine=EngineSpec(num_blocks=200),
            cost=CostSpec(kind="constant"),
            workload=WorkloadSpec(source="alpaca-vllm", num_requests=3),
        )
        output = runner.metrics({"x": spec})["x"]["output_tokens"]
        return replace(findings(claim(ours=output)), metrics={"output_tokens": output})

    experiment = replace(STUDY, id="tiny", run=two)
    monkeypatch.setattr(catalogue, "experiments", lambda: {"tiny": experiment})
    assert run_one("--data", str(folder)) == 0
    printed = capsys.readouterr()
    assert "real lengths are those of alpaca.csv" in printed.err
    result = json.loads(printed.out.splitlines()[-1])
    assert 12 <= result["metrics"]["real lengths: output_tokens"] <= 15 != result["metrics"]["output_tokens"]
    assert [one["name"] for one in result["claims"]] == ["rate ratio", "rate ratio, real lengths"]
    assert result["config"]["real_lengths"] == ["alpaca.csv"]
    assert "--data DIR" in result["command"]


def test_page_has_the_claims_the_figures_and_the_differences(run_one: Callable[..., int], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run_one("--html", str(page)) == 0
    shown = page.read_text(encoding="utf-8")
    assert '<li class="met">' in shown
    assert "paper: rate ratio: 2; here 3: above (a larger device; row `x`)" in shown
    assert 'aria-label="A table: figure tiny-curve' in shown
    assert "picture" in shown
    assert "<p>no GPU</p>" in shown
    assert "vllm-ext repro tiny" in shown


def test_sources_that_are_not_committed_refuse_the_result_before_and_after_the_run(
    run_one: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An experiment earlier on the same command line took hours, in which somebody edited a file."""
    monkeypatch.setattr(provenance, "_checkout", lambda: tmp_path)
    clean = iter([True, False])  # when the option is read; before the run
    monkeypatch.setattr(provenance, "uncommitted", lambda root: [] if next(clean, False) else ["kernels/x.py"])
    out = tmp_path / provenance.RESULTS / "repro"
    assert run_one("--out-dir", str(out)) == 3
    assert "kernels/x.py. Commit them first" in capsys.readouterr().err
    assert not out.exists()
    assert not (tmp_path / "cache").exists()
    with pytest.raises(SystemExit):
        run_one("--out-dir", str(out))
    assert "kernels/x.py. Commit them first" in capsys.readouterr().err


def test_terminal_gets_the_json_only_if_asked_for(
    run_one: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run_one() == 0
    assert capsys.readouterr().out == f"{common_flags.JSON_HINT}\n"
    assert run_one("--json") == 0
    assert json.loads(capsys.readouterr().out)["name"] == "tiny"
