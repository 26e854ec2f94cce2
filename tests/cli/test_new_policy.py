"""`vllm-ext new-policy`: what it writes passes as written, and is a policy for the other commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.extent import HANG_S
from vllm_ext.cli import new_policy, simulate

SMALL = ("--cost", "constant", "--dataset", "fixed:20:8", "--num-requests", "12", "--max-model-len", "64")
CROWDED = (*SMALL, "--num-blocks", "9", "--max-num-seqs", "2", "--rate", "20", "--quiet")


def test_policy_and_test_pass_as_they_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert new_policy.main(["my-first", "--dir", str(tmp_path)]) == 0
    assert {file.name for file in tmp_path.iterdir()} == {"my_first.py", "test_my_first.py"}
    assert f"--policy {tmp_path / 'my_first.py'}:MyFirst" in capsys.readouterr().out
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_first.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=HANG_S,
    )  # fmt: skip
    assert "2 passed" in done.stdout, done.stdout


def test_policy_is_simulated_beside_vllm_alone_and_its_file_is_in_the_result_without_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new_policy.main(["mine", "--dir", str(tmp_path)])
    capsys.readouterr()
    flags = ["--system", "upstream-fcfs,fcfs", "--policy", f"{tmp_path / 'mine.py'}:Mine"]
    assert simulate.main([*CROWDED, *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["config"]["fcfs"]["engine"]["options"] == {"policies": ["mine.py:Mine"]}
    assert result["config"]["upstream-fcfs"]["engine"]["options"] == {}
    assert result["metrics"]["fcfs.policy_fallbacks"] == 0


@pytest.mark.parametrize(("name", "says"), [("My_Policy", "lower case"), ("2fast", "lower case"), ("class", "module")])
def test_name_that_cannot_be_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, says: str
) -> None:
    assert new_policy.main([name, "--dir", str(tmp_path)]) == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_file_that_is_there_is_kept_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_mine.py").write_text("kept")
    assert new_policy.main(["mine", "--dir", str(tmp_path)]) == 2
    assert "test_mine.py is there already" in capsys.readouterr().err
    assert [file.read_text() for file in tmp_path.iterdir()] == ["kept"]
