"""The result format of benchmarks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.report import common_flags, results
from vllm_ext.report.claim import Claim
from vllm_ext.report.results import Result, Workload

KEYS = {
    "name",
    "command",
    "config",
    "details",
    "seed",
    "versions",
    "machine",
    "workload",
    "metrics",
    "baselines",
    "claims",
}


def make_result(**changes: Any) -> Result:
    values: dict[str, Any] = {
        "name": "n",
        "command": "python benchmarks/n.py",
        "config": {"seats": 8},
        "seed": 0,
        "workload": Workload(name="w.jsonl", rows=3, sha256="0" * 64),
        "metrics": {"ttft_mean_ms": 2.5},
        "claims": [Claim(name="ttft_mean_ms", value=2.5, op="<=", goal=3.0)],
    }
    return Result(**{**values, **changes})


def test_json_has_the_documented_keys_and_says_whether_goals_were_met() -> None:
    decoded = json.loads(make_result().to_json())
    assert decoded.keys() == KEYS
    assert decoded["claims"] == [
        {
            "name": "ttft_mean_ms",
            "value": 2.5,
            "op": "<=",
            "goal": 3.0,
            "met": True,
            "note": "",
            "headline": False,
        }
    ]
    assert decoded["versions"].keys() >= {"python", "vllm-ext", "numpy"}
    assert decoded["machine"]["cpu_cores"] >= 1


def test_a_missed_goal_without_a_reason_is_refused() -> None:
    with pytest.raises(ValueError, match=r"note of claim m: a missed goal \(2.0 <= 1.0\) must say why"):
        make_result(claims=[Claim(name="m", value=2.0, op="<=", goal=1.0)])


def test_value_of_a_claim_must_be_finite() -> None:
    with pytest.raises(ValueError, match=r"claims\[m\]\[value\]=nan: must be a finite number"):
        make_result(claims=[Claim(name="m", value=float("nan"), goal=1.0, why="nothing ran")])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "3", True])
def test_metric_must_be_a_finite_number(value: Any) -> None:
    with pytest.raises(ValueError, match=r"metrics\[x_ms\]"):
        make_result(metrics={"x_ms": value})
    with pytest.raises(ValueError, match=r"baselines\[up\]\[x_ms\]"):
        make_result(baselines={"up": {"x_ms": value}})


def test_absolute_path_in_the_configuration_is_refused() -> None:
    with pytest.raises(ValueError, match=r"result.config.model.*absolute paths"):
        make_result(config={"model": "/home/me/model"}).to_json()


def test_command_cuts_absolute_paths_to_their_last_part() -> None:
    line = results.command(
        ["--dataset", "/data/x y.jsonl", "--out=/tmp/o.json", "--loads", "0.5,0.9"], "/home/me/benchmarks/subject/n.py"
    )
    assert line == "python benchmarks/subject/n.py --dataset 'x y.jsonl' --out=o.json --loads 0.5,0.9"


def test_emit_puts_json_last_on_stdout_tables_on_stderr_and_writes_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "n.json"
    result = make_result(claims=[Claim(name="m", value=2.0, op="<=", goal=1.0, facts="too slow here")])
    results.emit(result, ["a table"], out)
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1]) == json.loads(out.read_text(encoding="utf-8"))
    assert "a table" in printed.err
    assert "MISSED: too slow here" in printed.err


@pytest.mark.parametrize("asked", [False, True], ids=["plain", "--json"])
@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_terminal_gets_json_only_if_asked_for_and_the_file_always(
    terminal: bool, asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    out = tmp_path / "n.json"
    result = make_result()
    results.emit(result, ["a table"], out, as_json=asked)
    printed = capsys.readouterr()
    assert "a table" in printed.err
    assert printed.out == f"{common_flags.JSON_HINT if terminal and not asked else result.to_json()}\n"
    assert json.loads(out.read_text(encoding="utf-8")) == json.loads(result.to_json())


def test_emit_writes_and_prints_nothing_that_cannot_be_serialised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "n.json"
    with pytest.raises(ValueError):
        results.emit(make_result(config={"x": float("nan")}), ["a table"], out)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")
    assert not out.exists()
