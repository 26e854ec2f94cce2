"""Which commit a result comes from, how old it is, and when it may not be written."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.observability import provenance, results
from vllm_ext.observability.provenance import (
    CommitAge,
    UncommittedSources,
    check_committed,
    commit_age,
    measured_at,
    result_path,
)

MODULE = "vllm_ext/observability/provenance.py"
"""The file by which a package knows its checkout."""
DAY = "2026-10-11"


def git(root: Path, *arguments: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    for who in ("AUTHOR", "COMMITTER"):
        values = {"NAME": "n", "EMAIL": "n@example.org", "DATE": f"{DAY}T12:00:00+0000"}
        environ |= {f"GIT_{who}_{key}": value for key, value in values.items()}
    ran = subprocess.run(["git", *arguments], cwd=root, env=environ, check=True, capture_output=True, text=True)
    return ran.stdout.strip()


def write(root: Path, name: str, text: str = "") -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def commit(root: Path, name: str, text: str = "") -> str:
    write(root, name, text)
    git(root, "add", name)
    git(root, "commit", "-q", "-m", name)
    return git(root, "rev-parse", "--short", "HEAD")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository that the package seems to run from."""
    root = tmp_path / "checkout"
    root.mkdir()
    git(root, "init", "-q")
    commit(root, MODULE)
    monkeypatch.setattr(provenance, "__file__", str(root / MODULE))
    return root


def result_of(commit: str | None) -> dict[str, Any]:
    return {"versions": {} if commit is None else {"commit": commit}}


def test_without_a_repository_the_commit_is_what_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkout: Path
) -> None:
    """As on a machine to which a checkout was brought without its history."""
    monkeypatch.setenv("VLLM_EXT_COMMIT", "0123abc")
    assert provenance.current_commit() == git(checkout, "rev-parse", "--short", "HEAD")
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / MODULE))
    (tmp_path / MODULE).parent.mkdir(parents=True)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.current_commit() == "0123abc"
    monkeypatch.delenv("VLLM_EXT_COMMIT")
    assert provenance.current_commit() is None


def test_age_counts_the_commits_since(checkout: Path) -> None:
    first = commit(checkout, "a")
    assert commit_age(result_of(first), checkout) == CommitAge(commit=first, date=DAY, commits_since=0)
    commit(checkout, "b")
    last = commit(checkout, "c")
    age = commit_age(result_of(f"{first}-dirty"), checkout / "vllm_ext")
    assert age == CommitAge(commit=first, date=DAY, commits_since=2, dirty=True)
    assert str(age) == f"{first} with uncommitted changes, {DAY}, 2 commits ago"
    assert provenance.head_age(checkout) == CommitAge(commit=last, date=DAY, commits_since=0)


@pytest.mark.parametrize(
    ("recorded", "said"),
    [("0123456", "0123456"), ("0123456-dirty", "0123456 with uncommitted changes"), (None, "unknown")],
)
def test_result_without_an_age_still_names_its_commit(checkout: Path, recorded: str | None, said: str) -> None:
    assert measured_at(result_of(recorded), checkout) == said


@pytest.mark.parametrize("recorded", [None, "0" * 40, "unknown", "--all"])
def test_age_of_a_commit_the_checkout_does_not_have_is_none(checkout: Path, recorded: str | None) -> None:
    assert commit_age(result_of(recorded), checkout) is None


def test_age_outside_of_a_checkout_is_none(checkout: Path, tmp_path: Path) -> None:
    assert commit_age(result_of(git(checkout, "rev-parse", "HEAD")), tmp_path) is None


def test_age_without_git_is_none(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = git(checkout, "rev-parse", "HEAD")
    monkeypatch.setenv("PATH", "")
    assert commit_age(result_of(recorded), checkout) is None


def test_commit_of_a_package_that_is_no_part_of_the_checkout_around_it_is_none(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel in a virtual environment that lies in somebody's repository."""
    installed = checkout / ".venv" / MODULE
    write(checkout, f".venv/{MODULE}")
    monkeypatch.setattr(provenance, "__file__", str(installed))
    assert provenance.current_commit() is None


def test_results_and_pages_made_from_them_leave_a_tree_clean(checkout: Path) -> None:
    committed = ("benchmarks/results/old.json", "docs/reproductions.md", "docs/results/memory.md", "README.md")
    for name in committed:
        commit(checkout, name)
    for name in (*committed, "benchmarks/results/repro/new.json"):
        write(checkout, name, "new")
    write(checkout, "notes.txt")
    write(checkout, "scratch/try.py")
    assert provenance.uncommitted(checkout) == []
    assert provenance.current_commit() == git(checkout, "rev-parse", "--short", "HEAD")
    check_committed(checkout / "benchmarks/results/new.json")


@pytest.mark.parametrize("name", [MODULE, "docs/page.md", "kernels/new.py", "benchmarks/new.py", "vllm_ext/a b/ü.py"])
def test_changed_file_and_new_source_file_refuse_a_result_by_name(checkout: Path, name: str) -> None:
    commit(checkout, "docs/page.md")
    write(checkout, name, "new")
    assert provenance.current_commit() == git(checkout, "rev-parse", "--short", "HEAD") + "-dirty"
    out = checkout / "benchmarks/results/deep/new.json"
    with pytest.raises(UncommittedSources, match=rf"differ from their commit: {name}\. Commit them first"):
        check_committed(out)
    check_committed(checkout / "elsewhere.json")


def test_moved_file_is_named_with_both_names(checkout: Path) -> None:
    commit(checkout, "kernels/old.py", "text")
    git(checkout, "mv", "kernels/old.py", "kernels/new.py")
    assert provenance.uncommitted(checkout) == ["kernels/new.py", "kernels/old.py"]


def test_long_list_of_files_is_cut(checkout: Path) -> None:
    for number in range(12):
        write(checkout, f"kernels/k{number:02}.py")
    with pytest.raises(UncommittedSources, match=r"kernels/k07\.py and 4 more\."):
        check_committed(checkout / "benchmarks/results/x.json")


def test_option_is_refused_before_anything_is_measured(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    results.add_arguments(parser)
    out = str(checkout / "benchmarks/results/x.json")
    assert parser.parse_args(["--out", out]).out == Path(out)
    write(checkout, MODULE, "new")
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--out", out])
    assert ended.value.code == 2
    assert MODULE in capsys.readouterr().err
    assert result_path("x.json") == Path("x.json")


def test_sources_changed_during_the_run_refuse_the_file_after_printing(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = results.Workload(name="w", rows=1, sha256="0" * 64)
    result = results.Result(name="n", command="c", config={}, seed=0, workload=workload, metrics={"x_s": 1.0})
    out = checkout / "benchmarks/results/n.json"
    write(checkout, MODULE, "new")
    with pytest.raises(UncommittedSources):
        results.emit(result, [], out)
    assert json.loads(capsys.readouterr().out)["metrics"] == {"x_s": 1.0}
    assert not out.exists()
