"""`vllm-ext plan` on tiny traces: verdict, files, and what is wrong with a trace."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.cli import new_policy, plan
from vllm_ext.cli.plan import main
from vllm_ext.report import common_flags
from vllm_ext.report.plots import Series
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
    ours = {"fcfs-tuned", "alise", "alise, for the tail", "sarathi", "past-future", "accelgen", "auto"}
    assert {key.split(".load_")[0] for key in result["metrics"] if ".load_" in key} == {"vLLM tuned", *ours}
    assert result["baselines"]["vLLM default"]["load_8.requests"] == 30
    assert result["config"]["recommended"] in printed.err
    assert "vllm serve opt-13b" in printed.err
    assert "<svg" in plot.read_text(encoding="utf-8")
    assert str(tmp_path) not in printed.out


@pytest.mark.parametrize(
    "part", [("--num-requests", "10"), ("--duration", "0.95")], ids=["its first requests", "its first second"]
)
def test_load_1_of_a_part_is_the_part_as_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], part: tuple[str, str]
) -> None:
    """Ten requests in 0.9 s, then twenty in 100 s: the part's own rate is 10/s, the file's 0.3/s."""
    path = tmp_path / "bursty.jsonl"
    times = [0.1 * i for i in range(10)] + [5.0 * i for i in range(1, 21)]
    rows = [{"prompt_tokens": 20, "output_tokens": 1, "timestamp": time_s} for time_s in times]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    assert main(["--trace", str(path), "--loads", "1,2", *part, *FAST]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["metrics"]["own_rate_per_s"] == pytest.approx(10.0)
    default = result["baselines"]["vLLM default"]
    for load, last_s in ((1, 0.9), (2, 0.45)):
        assert default[f"load_{load}.requests"] == 10
        assert last_s < default[f"load_{load}.duration_s"] < last_s + 0.1


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
    assert "nothing helps at 0.5, 1 times your load (0.0167, 0.0333 requests/s): no request waits" in printed.err
    assert printed.out == f"{common_flags.JSON_HINT}\n"


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
    assert main(arguments) == 3
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


def test_system_is_not_offered_where_plan_compares_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--system", "--scheduler-cls"):
        with pytest.raises(SystemExit) as stopped:
            main([flag, "alise"])
        assert stopped.value.code == 2
        assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize(("longest", "status"), [(511, 0), (512, 3)], ids=["fits", "fills the context"])
def test_rejected_prompts_are_missed_said_and_status_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], longest: int, status: int
) -> None:
    path = tmp_path / "long.jsonl"
    rows = [{"prompt_tokens": longest if i < 9 else 20, "output_tokens": 1, "timestamp": 9.0 * i} for i in range(12)]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    assert main(["--trace", str(path), "--loads", "1", "--slo", "e2e=5", *FAST]) == status
    shown = capsys.readouterr()
    attained = json.loads(shown.out)["baselines"]["vLLM default"]["load_1.slo_attainment_fraction"]
    assert attained == (1 if status == 0 else 0.25)
    said = (
        "incomplete: 9 of 12 requests (75.0%) were rejected and count as missed: their prompts fill the context of 512"
    )
    assert (said in shown.err) is bool(status)
    header = next(line for line in shown.err.splitlines() if line.startswith("x load"))
    assert header.split()[-2:] == ["unfinished", "rejected"]


def test_overload_that_is_cut_off_does_not_look_better_than_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Forty requests at once, a seat for one: at the cut ten have been answered, two of them in time."""
    path = trace(tmp_path / "mine.jsonl", requests=40, gap_s=0.001)
    flags = ["--trace", str(path), "--loads", "1", "--slo", "ttft=1", "--max-num-seqs", "1", *FAST]
    attained = []
    for bound in ([], ["--max-time", "10"]):
        main([*flags, *bound])
        attained.append(json.loads(capsys.readouterr().out)["baselines"]["vLLM default"])
    whole, cut = attained
    assert cut["load_1.unfinished_requests"] > whole["load_1.unfinished_requests"] == 0
    assert cut["load_1.slo_attainment_fraction"] == whole["load_1.slo_attainment_fraction"] < 0.2


def test_candidates_that_cannot_be_told_apart_share_a_line_under_a_title(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def point(spec: SimulationSpec) -> dict[str, float]:
        latency = 10.0 if spec.engine.system == "sarathi" else 20.0
        return {"requests": 30.0, "contended_steps": 1.0, "normalised_latency_mean_ms_per_token": latency}

    drawn: dict[str, Any] = {}

    def lines(series: Sequence[Series], path: Path, **options: Any) -> None:
        drawn.update(options, labels=[one.label for one in series])

    monkeypatch.setattr(pools, "simulate_point", point)
    monkeypatch.setattr(plan, "lines", lines)
    main(["--trace", str(trace(tmp_path / "mine.jsonl")), "--loads", "1", "--plot", str(tmp_path / "p.svg"), *FAST])
    capsys.readouterr()
    assert drawn["title"] == "mine.jsonl\nopt-13b on a100-40"
    alike = "vLLM default, vLLM tuned, fcfs-tuned, alise, alise, for the tail, past-future, accelgen, auto"
    assert drawn["labels"] == [alike, "sarathi"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--loads", "1,x"], "--loads 1,x: must be numbers above 0"),
        (["--loads", "0,1"], "--loads 0,1: must be numbers above 0"),
        (["--device", "toaster"], "toaster"),
        (["--num-blocks", "9"], "max_model_len=2048: must fit into the KV cache, which holds 128 tokens"),
        (
            ["--loads", "1", "--max-time", "0.001", *FAST],
            "no request ended under vLLM default at 1 x: --max-time 0.001 is too early",
        ),
    ],
    ids=["no-number", "zero-load", "device", "pool-too-small", "nothing-ends"],
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
