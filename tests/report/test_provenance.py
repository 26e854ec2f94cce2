"""Which commit and sources a result comes from, and when it may not be written."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.report import common_flags, provenance, results
from vllm_ext.report.provenance import UncommittedSources, check_committed, measured_at, result_path

MODULE = "vllm_ext/report/provenance.py"
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


def test_without_a_repository_the_commit_is_what_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkout: Path
) -> None:
    """As on a machine to which a checkout was brought without its history."""
    monkeypatch.setenv("VLLM_EXT_COMMIT", "0123abc")
    assert provenance.current()["commit"] == git(checkout, "rev-parse", "--short", "HEAD")
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / MODULE))
    write(tmp_path, MODULE)
    write(tmp_path, "benchmarks/run.py", "1")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    sources = provenance.digest_of_files(tmp_path)
    assert provenance.current() == {"commit": "0123abc", "sources": sources}
    monkeypatch.delenv("VLLM_EXT_COMMIT")
    assert provenance.current() == {"sources": sources}


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"commit": "0123456", "committed": DAY}, f"0123456, {DAY}"),
        ({"commit": "0123456"}, "0123456"),
        ({"commit": "0123456-dirty", "committed": DAY}, f"0123456 with uncommitted changes, {DAY}"),
        ({}, "unknown"),
    ],
)
def test_result_names_its_commit_and_the_day_of_it(versions: dict[str, str], said: str) -> None:
    assert measured_at({"versions": versions}) == said


def test_sources_are_known_by_commit_day_and_digest(checkout: Path) -> None:
    short = commit(checkout, "benchmarks/run.py", "1")
    found = provenance.current()
    assert found == {"commit": short, "committed": DAY, "sources": provenance.digest_of_commit(checkout, "HEAD")}
    assert len(found["sources"]) == 16


@pytest.mark.parametrize("name", ["kernels/k.cpp", "vllm_ext/a/ü b.py", "benchmarks/run.py", "patches/__init__.py"])
def test_digest_changes_with_each_source_and_with_its_name(checkout: Path, name: str) -> None:
    commit(checkout, "benchmarks/run.py", "1")
    digests = [provenance.digest_of_files(checkout)]
    commit(checkout, name, "2")
    digests.append(provenance.digest_of_files(checkout))
    git(checkout, "mv", name, f"{Path(name).parent}/other{Path(name).suffix}")
    digests.append(provenance.digest_of_files(checkout))
    assert None not in digests
    assert len(set(digests)) == 3


def test_digest_is_the_same_of_files_and_of_their_commit_and_knows_no_results(checkout: Path) -> None:
    commit(checkout, "benchmarks/run.py", "1")
    digest = provenance.digest_of_files(checkout)
    for name in ("benchmarks/results/a.py", "docs/page.py", "benchmarks/notes.md"):
        commit(checkout, name, "text")
    assert provenance.digest_of_files(checkout) == provenance.digest_of_commit(checkout, "HEAD") == digest
    assert provenance.digest_of_commit(checkout, "0" * 40) is None


def test_digest_of_an_installed_package_is_none(tmp_path: Path) -> None:
    write(tmp_path, MODULE)
    assert provenance.digest_of_files(tmp_path) is None


def kept(commit: str | None, sources: str | None, committed: str | None = DAY) -> dict[str, Any]:
    named = {"commit": commit, "sources": sources, "committed": committed}
    return {"versions": {name: value for name, value in named.items() if value is not None}}


@pytest.mark.parametrize("recorded", [None, "unknown", "--all", "0123456-dirty"])
def test_kept_result_without_a_commit_is_misnamed(checkout: Path, recorded: str | None) -> None:
    assert "must be the hash of a commit" in (provenance.misnamed(kept(recorded, "0" * 16), checkout) or "")


def test_kept_result_is_one_that_a_commit_of_the_history_repeats(checkout: Path) -> None:
    commit(checkout, "benchmarks/run.py", "1")
    sources = provenance.digest_of_files(checkout)
    first = git(checkout, "rev-parse", "--short", "HEAD")
    commit(checkout, "benchmarks/run.py", "2")
    assert provenance.misnamed(kept(first, sources), checkout) is None
    assert "there is no such commit" in (provenance.misnamed(kept(first, "0" * 16), checkout) or "")
    assert "must be said" in (provenance.misnamed(kept(first, None), checkout) or "")
    assert "must be said" in (provenance.misnamed(kept(first, sources, None), checkout) or "")


def test_commit_that_was_rewritten_is_found_by_its_sources(checkout: Path) -> None:
    first = commit(checkout, "benchmarks/run.py", "1")
    sources = provenance.digest_of_files(checkout)
    git(checkout, "commit", "-q", "--amend", "-m", "said otherwise")
    git(checkout, "reflog", "expire", "--expire=now", "--all")
    git(checkout, "gc", "-q", "--prune=now")
    assert provenance.digest_of_commit(checkout, first) is None
    assert provenance.misnamed(kept(first, sources), checkout) is None


def test_shallow_clone_does_not_know_which_commits_exist(checkout: Path, tmp_path: Path) -> None:
    commit(checkout, "benchmarks/run.py", "1")
    git(tmp_path, "clone", "-q", "--depth", "1", checkout.as_uri(), "shallow")
    assert provenance.misnamed(kept("0123456", "0" * 16), tmp_path / "shallow") is None
    assert provenance.misnamed(kept("0123456", "0" * 16), checkout) is not None


def test_commit_of_a_package_that_is_no_part_of_the_checkout_around_it_is_none(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel in a virtual environment that lies in somebody's repository."""
    installed = checkout / ".venv" / MODULE
    write(checkout, f".venv/{MODULE}")
    monkeypatch.setattr(provenance, "__file__", str(installed))
    assert provenance.current() == {}


def test_results_and_pages_made_from_them_leave_a_tree_clean(checkout: Path) -> None:
    committed = ("benchmarks/results/old.json", "docs/results/memory.md", "README.md")
    for name in committed:
        commit(checkout, name)
    for name in (*committed, "benchmarks/results/repro/new.json"):
        write(checkout, name, "new")
    write(checkout, "notes.txt")
    write(checkout, "scratch/try.py")
    assert provenance.uncommitted(checkout) == []
    assert provenance.current()["commit"] == git(checkout, "rev-parse", "--short", "HEAD")
    check_committed(checkout / "benchmarks/results/new.json")


@pytest.mark.parametrize(
    "name", [MODULE, "docs/page.md", "kernels/new.py", "kernels/new.cpp", "benchmarks/new.py", "vllm_ext/a b/ü.py"]
)
def test_changed_file_and_new_source_file_refuse_a_result_by_name(checkout: Path, name: str) -> None:
    commit(checkout, "docs/page.md")
    write(checkout, name, "new")
    assert provenance.current()["commit"] == git(checkout, "rev-parse", "--short", "HEAD") + "-dirty"
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
    common_flags.add(parser, "out", "quick", "seed")
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


def test_checkout_keeps_metrics_and_the_details_beside(checkout: Path) -> None:
    commit(checkout, "benchmarks/run.py", "1")
    workload = results.Workload(name="w", rows=1, sha256="0" * 64)
    result = results.Result(
        name="n", command="c", config={"a": 1}, details={"series": [1, 2]}, seed=0, workload=workload,
        metrics={"x_s": 1.23456789},
    )  # fmt: skip
    out = checkout / "benchmarks/results/deep/n.json"
    results.emit(result, [], out)
    text = out.read_text(encoding="utf-8")
    found, full = json.loads(text), json.loads((checkout / "benchmarks/results/full/deep/n.json").read_text())
    assert found.pop("metrics") == {"x_s": 1.23457}
    assert full.pop("metrics") == {"x_s": 1.23456789}
    assert full.pop("details") == {"series": [1, 2]}
    assert found == full
    assert provenance.misnamed(full, checkout) is None
    results.emit(result, [], checkout / "elsewhere.json")
    assert json.loads((checkout / "elsewhere.json").read_text())["details"] == {"series": [1, 2]}
