"""`make bench-quick`: which scripts it runs, and what it makes of their ends."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from vllm_ext.report.results import NEEDS_DEVICE

from .conftest import BENCHMARKS


@pytest.fixture
def bench_quick(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent / "scripts"))
    return importlib.import_module("bench_quick")


def script(folder: Path, name: str, status: int) -> None:
    text = f'''"""A question.

    python benchmarks/subject/{name} --quick
"""
import pathlib, sys
pathlib.Path(__file__).with_suffix(".ran").write_text(" ".join(sys.argv[1:]))
sys.exit({status})
'''
    (folder / "subject").mkdir(exist_ok=True)
    (folder / "subject" / name).write_text(text, encoding="utf-8")


def test_each_benchmark_is_run_and_no_part(bench_quick: ModuleType) -> None:
    names = {file.name for file in bench_quick.benchmarks(BENCHMARKS)}
    assert {"engine_clock.py", "kv_quant.py", "kv_tier_cuda.py", "simulator_validation.py", "step_overhead.py"} <= names
    assert names & {"kv_quant_model.py", "record_run.py", "step_overhead_subject.py"} == set()


def test_failure_and_absent_device_do_not_end_the_run(
    bench_quick: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, status in (("a.py", 3), ("b.py", NEEDS_DEVICE), ("c.py", 0)):
        script(tmp_path, name, status)
    (tmp_path / "subject" / "part.py").write_text(
        '"""Of `benchmarks/subject/c.py --quick`."""\nraise SystemExit(9)\n', encoding="utf-8"
    )
    assert bench_quick.main(["--seed", "1"], tmp_path) == 1
    assert {file.name: file.read_text() for file in tmp_path.glob("*/*.ran")} == dict.fromkeys(
        ("a.ran", "b.ran", "c.ran"), "--quick --seed 1"
    )
    assert capsys.readouterr().err.splitlines()[-4:] == [
        "== bench-quick",
        "FAILED   a.py: exit status 3",
        "skipped  b.py: needs a device that this machine has not",
        "passed   c.py",
    ]


@pytest.mark.parametrize(("statuses", "returned"), [([0, NEEDS_DEVICE], 0), ([], 1)])
def test_run_without_failures_passes_and_one_without_benchmarks_fails(
    bench_quick: ModuleType, tmp_path: Path, statuses: list[int], returned: int
) -> None:
    for number, status in enumerate(statuses):
        script(tmp_path, f"b{number}.py", status)
    assert bench_quick.main([], tmp_path) == returned
