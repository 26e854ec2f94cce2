"""The harness that runs vLLM's own tests, without running them: its list, its verdicts, the archive it takes."""

from __future__ import annotations

import hashlib
import importlib
import io
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.systems import known, table

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("upstream_differs.toml")
PAGE = "https://index.invalid/simple/vllm/"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Returns how to import a module of scripts/."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name.startswith(("upstream_", "conformance")):
            del sys.modules[name]


def test_every_entry_names_systems_of_the_table_suites_and_a_reason(scripts: Any) -> None:
    differs, conformance = scripts("upstream_differs"), scripts("conformance")
    entries = differs.read(LIST)
    assert entries
    for entry in entries:
        assert set(entry.systems) <= {*known(unserved=True), *differs.CONTROLS, differs.EVERY}, entry
        assert set(entry.excepted) <= set(known(unserved=True)), entry
        assert len(entry.why) > 20, entry
        assert all(test.startswith(tuple(conformance.SUITES.values())) for test in entry.tests), entry


def test_no_system_has_a_test_on_the_list_twice(scripts: Any) -> None:
    differs = scripts("upstream_differs")
    entries = differs.read(LIST)
    for system in (*known(unserved=True), *differs.CONTROLS):
        listed = [test for entry in entries if entry.counts_for(system) for test in entry.tests]
        assert sorted(set(listed)) == sorted(listed), system


def test_all_systems_that_a_server_may_run_are_run_unless_some_are_chosen(scripts: Any) -> None:
    conformance = scripts("conformance")
    assert conformance.systems("") == [system.name for system in table(unserved=True) if not system.oracle]
    assert conformance.systems("fcfs  alise") == ["fcfs", "alise"]
    with pytest.raises(SystemExit, match="oracle-alise: must be among fcfs"):
        conformance.systems("fcfs oracle-alise")


def entry(differs: Any, **fields: Any) -> Any:
    return differs.Entry(**{"systems": ("*",), "why": "told here", "tests": ("t.py::test_a",), **fields})


def test_what_differs_as_listed_is_no_error_and_all_else_is(scripts: Any) -> None:
    differs = scripts("upstream_differs")
    outcomes = {
        "t.py::test_a[1]": {"outcome": "failed", "message": "ValueError: no"},
        "t.py::test_a[2]": {"outcome": "passed", "message": ""},
        "t.py::test_b": {"outcome": "failed", "message": "KeyError: 1"},
        "t.py::test_c": {"outcome": "passed", "message": ""},
        "t.py::test_d": {"outcome": "skipped", "message": ""},
    }
    verdict = differs.judge(outcomes, "alise", [entry(differs)])
    assert (verdict.passed, verdict.differs, verdict.skipped) == (1, 1, 1)
    assert (verdict.failed, verdict.stale) == (("t.py::test_b",), ("t.py::test_a[2]",))
    assert verdict.unexpected == 2
    assert differs.judge(outcomes, "alise", [entry(differs, says="KeyError")]).failed[0] == "t.py::test_a[1]"
    assert differs.unmatched(outcomes, "alise", [entry(differs, tests=("t.py::test_e",))]) == ["t.py::test_e"]


def test_an_entry_counts_for_the_systems_that_it_names(scripts: Any) -> None:
    differs = scripts("upstream_differs")
    assert entry(differs).counts_for("alise")
    assert not entry(differs).counts_for("vllm")
    assert not entry(differs, excepted=("fcfs",)).counts_for("fcfs")
    assert entry(differs, systems=("vllm",)).counts_for("vllm")
    assert not entry(differs, systems=("vllm",), without="json").counts_for("vllm")
    assert entry(differs, systems=("vllm",), without="no_such_module").counts_for("vllm")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('tests = ["x"]', r"\['systems', 'why'\] missing"),
        ('systems = ["*"]\nwhy = ""\ntests = ["x"]', r"\['why'\] missing"),
        ('systems = ["*"]\nwhy = "w"\ntests = ["x"]\ntets = 1', r"\['tets'\]; known are"),
    ],
    ids=["no-reason", "empty-reason", "misspelt"],
)
def test_an_entry_that_is_not_whole_is_refused(scripts: Any, tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "list.toml"
    path.write_text(f"[[differs]]\n{text}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"list.toml, entry 1: {error}"):
        scripts("upstream_differs").read(path)


@pytest.mark.parametrize(
    "page",
    [
        '{"files": [{"filename": "vllm-1.tar.gz", "url": "../../f/vllm-1.tar.gz", "hashes": {"sha256": "ab"}},'
        ' {"filename": "vllm-2.tar.gz", "url": "x", "hashes": {}}]}',
        '<a href="../../f/vllm-1.tar.gz#sha256=ab">vllm-1.tar.gz</a> <a href="x/vllm-2.tar.gz">vllm-2.tar.gz</a>',
    ],
    ids=["json", "html"],
)
def test_a_page_of_an_index_is_read_and_files_without_a_digest_are_left_out(scripts: Any, page: str) -> None:
    archive = scripts("upstream_archive")
    source = archive.Source("https://index.invalid/f/vllm-1.tar.gz", "ab")
    assert dict(archive.links(page, PAGE)) == {"vllm-1.tar.gz": source}


def packed(folder: Path, names: list[str]) -> Path:
    path = folder / "vllm-1.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 1
            tar.addfile(member, io.BytesIO(b"x"))
    return path


def test_only_tests_are_unpacked_and_kept(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = scripts("upstream_archive")
    path = packed(tmp_path, ["vllm-1/tests/a.py", "vllm-1/pyproject.toml", "vllm-1/vllm/__init__.py"])
    source = archive.Source(path.as_uri(), hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(archive, "find", lambda version: {"1": source}[version])
    folder = archive.obtain("1+cpu", tmp_path / "cache")
    assert sorted(str(file.relative_to(folder)) for file in folder.rglob("*.*")) == ["pyproject.toml", "tests/a.py"]
    path.unlink()
    assert archive.obtain("1+cpu", tmp_path / "cache") == folder


@pytest.mark.parametrize(
    ("names", "digest", "error"),
    [
        (["vllm-1/tests/a.py"], "00", "has the SHA-256"),
        (["vllm-1/vllm/a.py"], "", "holds no tests"),
        (["vllm-1/tests/../../../a.py"], "", "outside"),
    ],
    ids=["another-file", "no-tests", "leaves-the-folder"],
)
def test_an_archive_that_is_not_right_leaves_nothing(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], digest: str, error: str
) -> None:
    archive = scripts("upstream_archive")
    path = packed(tmp_path, names)
    source = archive.Source(path.as_uri(), digest or hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(archive, "find", lambda version: source)
    with pytest.raises(archive.ArchiveError, match=error):
        archive.obtain("1", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert not (tmp_path / "a.py").exists()


def test_a_version_that_no_index_has_is_an_error_that_says_where_pip_looks(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = scripts("upstream_archive")
    page = tmp_path / "index.html"
    page.write_text("<a href='vllm-1.tar.gz#sha256=ab'>x</a>", encoding="utf-8")
    monkeypatch.setattr(archive, "pip_pages", lambda: ["file:///no/such/page", page.as_uri()])
    assert archive.find("1").sha256 == "ab"
    with pytest.raises(archive.ArchiveError, match=r"no vllm-2\.tar\.gz .* configure an index"):
        archive.find("2")
