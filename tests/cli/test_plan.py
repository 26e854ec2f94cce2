"""`vllm-ext plan` on tiny traces: verdict, files, and what is wrong with a trace."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from vllm_ext.cli import new_policy
from vllm_ext.cli.plan import main
from vllm_ext.report import json_output
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep import pools

FAST = ["--num-blocks", "200", "--max-model-len", "512", "--cost", "constant", "--jobs", "1", "--quiet"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXT_CACHE", str(tmp_path / "cache"))


def trace(path: Path, *, requests: int = 30, gap_s: float = 0.5) -> Path:
    rows = [{"prompt_tokens": 20, "output_tokens": 4 + 37 * (i % 3), "timestamp": gap_s * i} for i in range(requests)]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_plan_reports_every_candidate_at_every_load_and_one_recommendation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plot = tmp_path / "plan.json", tmp_path / "plan.svg"
    arguments = ["--trace", str(trace(tmp_path / "mine.jsonl")), "--loads", "1,8", "--out", str(out)]
    assert main([*arguments, "--plot", str(plot), "--max-num-seqs", "2", *FAST]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert result == json.loads(out.read_text(encoding="utf-8"))
    assert result["metrics"]["own_rate_per_s"] == pytest.approx(2.0)
    assert {key.split(".load_")[0] for key in result["metrics"] if ".load_" in key} == {
        "vLLM tuned",
        "fcfs-tuned",
        "alise",
        "alise, for the tail",
        "sarathi",
        "past-future",
        "accelgen",
        "auto",
    }
    assert result["baselines"]["vLLM default"]["load_8.requests"] == 30
    assert result["config"]["recommended"] in printed.err
    assert "vllm serve opt-13b" in printed.err
    assert "<svg" in plot.read_text(encoding="utf-8")
    assert str(tmp_path) not in printed.out


def test_plan_without_a_queue_says_so_row_by_row_and_stays_with_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal, which gets the rows as they come, the defaults at the own load first, the advice, but no JSON."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    flags = [*(flag for flag in FAST if flag != "--quiet"), "--loads", "0.5,1", "--slo", "ttft=5,tbt=1"]
    assert main(["--trace", str(trace(tmp_path / "mine.jsonl", requests=8, gap_s=30.0)), *flags]) == 0
    printed = capsys.readouterr()
    said = printed.err.splitlines()
    assert said[1].startswith("1 x: vLLM default: ms/token ")
    assert "1 x: alise: as vLLM default, not run: nobody waited" in said
    assert "recommended: vLLM default" in printed.err
    assert "nothing helps at 0.5, 1 times your load" in printed.err
    assert printed.out == f"{json_output.HINT}\n"


def test_failed_run_is_named_the_rest_is_judged_and_the_next_plan_runs_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def point(spec: SimulationSpec) -> dict[str, float]:
        ran.append(spec.engine.system)
        if spec.engine.system == "auto" and ran.count("auto") == 1:
            raise ArithmeticError("not today")
        latency = 10.0 if spec.engine.system == "sarathi" else 20.0
        return {"requests": 30.0, "contended_steps": 1.0, "normalised_latency_mean_ms_per_token": latency}

    monkeypatch.setattr(pools, "simulate_point", point)
    arguments = ["--trace", str(trace(tmp_path / "mine.jsonl")), "--loads", "1", *FAST]
    assert main(arguments) == 1
    shown = capsys.readouterr()
    assert "1 x: auto: failed: ArithmeticError: not today" in shown.err
    assert "candidates left out of the advice: auto" in shown.err
    result = json.loads(shown.out)
    assert (result["config"]["recommended"], result["config"]["failed"]) == ("sarathi", ["auto at 1"])
    before = len(ran)
    assert main(arguments) == 0
    assert ran[before:] == ["auto"]


def test_policy_of_ones_own_is_one_more_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new_policy.main(["mine", "--dir", str(tmp_path)])

    def point(spec: SimulationSpec) -> dict[str, float]:
        latency = 10.0 if spec.engine.options.get("policies") else 20.0
        return {"requests": 30.0, "contended_steps": 1.0, "normalised_latency_mean_ms_per_token": latency}

    monkeypatch.setattr(pools, "simulate_point", point)
    policy = f"{tmp_path / 'mine.py'}:Mine"
    path = trace(tmp_path / "mine.jsonl")
    capsys.readouterr()
    assert main(["--trace", str(path), "--loads", "1", "--policy", policy, *FAST]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["config"]["recommended"] == "Mine"
    assert result["config"]["flags"] == ["--policy", "mine.py:Mine"]
    assert result["metrics"]["auto.load_1.normalised_latency_mean_ms_per_token"] == 20.0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--loads", "1,x"], "--loads 1,x: must be numbers above 0"),
        (["--loads", "0,1"], "--loads 0,1: must be numbers above 0"),
        (["--system", "alise"], "--system: plan compares its own candidates"),
        (["--device", "toaster"], "toaster"),
        (
            ["--loads", "1", "--max-time", "0.001", *FAST],
            "no request ended under vLLM default at 1 x: --max-time 0.001 is too early",
        ),
    ],
    ids=["no-number", "zero-load", "system", "device", "nothing-ends"],
)
def test_wrong_flag_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    assert main(["--trace", str(trace(tmp_path / "mine.jsonl")), *arguments]) == 2
    printed = capsys.readouterr().err
    assert problem in printed
    assert len([line for line in printed.splitlines() if line.startswith("vllm-ext plan: ")]) == 1


def test_trace_with_one_arrival_and_a_broken_line_are_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--trace", str(trace(tmp_path / "one.jsonl", requests=1)), *FAST]) == 2
    assert "1 requests with recorded arrivals" in capsys.readouterr().err
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt_tokens": 3, "output_tokens": 2, "timestamp": 0}\nnonsense\n', encoding="utf-8")
    assert main(["--trace", str(broken), *FAST]) == 2
    assert "broken.jsonl: line 2" in capsys.readouterr().err
