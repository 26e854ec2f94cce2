"""results_archive.py: what was measured, whole, in one file that can be checked."""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import results_archive

from vllm_ext.report import kept_result

RESULT: dict[str, Any] = {"name": "x", "metrics": {"ttft_mean_ms": 1.23456789}, "claims": [], "details": {"all": [1]}}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    results = tmp_path / "benchmarks" / "results"
    kept_result.write(RESULT, results / "repro" / "x.json", results)
    (results / "repro" / "x-curve.png").write_bytes(b"picture")
    return tmp_path


def test_the_archive_has_kept_and_full_results_and_its_checksum(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = checkout / "dist" / "r.tar.gz"
    assert results_archive.main([str(out)], checkout) == 0
    assert "MiB, all details of 1 results, SHA-256" in capsys.readouterr().out
    digest, name = (checkout / "dist" / "r.tar.gz.sha256").read_text().split()
    assert (digest, name) == (hashlib.sha256(out.read_bytes()).hexdigest(), "r.tar.gz")
    with tarfile.open(out) as archive:
        names = archive.getnames()
        full = archive.extractfile("results/full/repro/x.json")
        assert full is not None
        assert json.load(full) == RESULT
    assert sorted(names) == ["results/full/repro/x.json", "results/repro/x-curve.png", "results/repro/x.json"]


def test_the_same_files_give_the_same_bytes(checkout: Path) -> None:
    first = results_archive.packed(checkout)
    for path in checkout.rglob("*.json"):
        path.touch()
    assert results_archive.packed(checkout) == first


def test_a_full_result_of_another_run_is_refused(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full = checkout / "benchmarks" / "results" / "full" / "repro" / "x.json"
    full.write_text(json.dumps(RESULT | {"metrics": {"ttft_mean_ms": 2.0}}))
    assert results_archive.main([str(checkout / "r.tar.gz")], checkout) == 1
    said = "benchmarks/results/full/repro/x.json: is not the result in benchmarks/results/repro/x.json; delete it\n"
    assert capsys.readouterr().err == said
    assert not (checkout / "r.tar.gz").exists()


@pytest.mark.parametrize("name", ["repro/x.json", "full/repro/x.json"])
@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_result_is_one_line(checkout: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "benchmarks" / "results" / "full" / "repro" / "x.json").unlink()
    (checkout / "benchmarks" / "results" / name).write_text(text)
    assert results_archive.main([str(checkout / "r.tar.gz")], checkout) == 1
    assert capsys.readouterr().err.startswith(f"benchmarks/results/{name} can't be read: ")


def test_a_folder_as_output_is_one_line(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert results_archive.main([str(checkout)], checkout) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no result; run this in a checkout"):
        results_archive.packed(tmp_path)
