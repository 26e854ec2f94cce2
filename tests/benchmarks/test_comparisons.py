"""The command lines of `benchmarks/engine/comparisons.py`, and how its goals are judged."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from importlib import import_module as script
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.paper_servers import Paper
from vllm_ext.cli import compare

NAMES = ("conversations", "memory", "objectives", "swapping")


@pytest.fixture
def comparisons() -> ModuleType:
    return script("comparisons")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Paper:
    made = Paper(noise=0.002)
    monkeypatch.setattr(compare, "_backend", lambda *_: made)
    return made


def flags_of(comparison: Any) -> Mapping[str, list[str]]:
    return {name: shlex.split(flags) for name, flags in comparison.servers.items()}


def test_vllm_takes_the_flags_of_every_server(comparisons: ModuleType) -> None:
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    assert sorted(comparisons.COMPARISONS) == sorted(NAMES)
    parser = make_arg_parser(FlexibleArgumentParser())
    for one in comparisons.COMPARISONS.values():
        argv = one.argv("model", quick=False)
        of_all = argv[argv.index("--") + 1 :]
        for own in flags_of(one).values():
            parsed = parser.parse_args(["--model", "model", *of_all, *own])
            assert parsed.num_gpu_blocks_override > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_comparison_runs_by_its_command_line(
    comparisons: ModuleType, backend: Paper, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one server beside the baseline with `--quick`, whose result says how `vllm-ext compare` was called."""
    out = tmp_path / "out.json"
    backend.slower[next(iter(comparisons.COMPARISONS[name].servers))] = 0.5
    status = comparisons.main([name, "--quick", "--cells", str(tmp_path / "cells"), "--out", str(out)])
    assert status == 0
    found = json.loads(out.read_text())
    assert found["config"]["compare"].startswith("vllm-ext compare tiny-")
    assert found["command"].startswith(f"python benchmarks/engine/comparisons.py {name} --quick")
    first = next(iter(comparisons.COMPARISONS[name].servers))
    assert list(found["config"]["servers"]) == ["upstream", "upstream, again", first]
    header, *rows = found["config"]["tables"][name]
    assert [row[1] for row in rows[:3]] == ["upstream", "upstream, again", first]
    assert all(len(row) == len(header) for row in rows)
    assert float(rows[2][header.index("mean e2e, s")]) < float(rows[0][header.index("mean e2e, s")])
    assert {one["name"] for one in found["claims"]} <= {
        line.split(" = ")[0].removeprefix("goal: ") for line in capsys.readouterr().err.splitlines()
    }
    if name == "memory":
        assert [(one["op"], one["goal"]) for one in found["claims"]] == [], "its baseline is left out"


def test_a_goal_is_judged_at_the_highest_load_by_ratio_or_difference(comparisons: ModuleType) -> None:
    values = {"ours": {"load_1.2.on time": 0.9, "load_0.9.on time": 0.1}, "upstream": {"load_1.2.on time": 0.6}}
    goal = comparisons.Goal(server="ours", measure="on time", op=">=", goal=0.25, less=True)
    assert goal.judged(values, 1.2).as_dict() == {
        "name": "ours: on time less that of upstream", "value": pytest.approx(0.3), "op": ">=", "goal": 0.25,
        "met": True, "note": "0.9 and 0.6", "headline": False,
    }  # fmt: skip
    ratio = comparisons.Goal(server="ours", measure="on time", op="<=", goal=1.4)
    assert ratio.judged(values, 1.2).value == pytest.approx(1.5)
    assert not ratio.judged(values, 1.2).met
    assert goal.judged(values, 0.9) is None, "not measured there"
    values["upstream"]["load_1.2.on time"] = 0.0
    assert ratio.judged(values, 1.2) is None, "no ratio"
    assert goal.judged(values, 1.2).value == pytest.approx(0.9)
