"""What a container leaves of the machine's memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from vllm_ext.kv.host.memory import free_bytes

MIB = 2**20


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000 * MIB))


def group(directory: Path, limit: str, used: int, *, cached: int = 0, version: int = 2) -> None:
    """Make a control group."""
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}
    most, current, cache = names.get(version, ("memory.max", "memory.current", "inactive_file"))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / most).write_text(f"{limit}\n")
    (directory / current).write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 1\n{cache} {cached}\n")


def member(tmp_path: Path, *lines: str) -> Path:
    found = tmp_path / "membership"
    found.write_text("".join(f"{line}\n" for line in lines))
    return found


def test_a_limit_of_the_container_counts(tmp_path: Path) -> None:
    group(tmp_path / "pods" / "ours", str(300 * MIB), 100 * MIB, cached=10 * MIB)
    assert free_bytes(tmp_path, member(tmp_path, "0::/pods/ours")) == 210 * MIB, (
        "files in the page cache are given back"
    )


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    group(tmp_path / "pods", str(150 * MIB), 120 * MIB)
    group(tmp_path / "pods" / "ours", "max", 100 * MIB)
    assert free_bytes(tmp_path, member(tmp_path, "0::/pods/ours")) == 30 * MIB


def test_groups_of_version_1_are_read_too(tmp_path: Path) -> None:
    group(tmp_path / "memory" / "ours", str(300 * MIB), 200 * MIB, version=1)
    assert free_bytes(tmp_path, member(tmp_path, "5:cpu,cpuacct:/x", "4:memory:/ours", "0::/")) == 100 * MIB


def test_a_container_that_does_not_see_its_own_path_reads_what_it_sees(tmp_path: Path) -> None:
    group(tmp_path, str(50 * MIB), 0)
    assert free_bytes(tmp_path, member(tmp_path, "0::/outside/of/it")) == 50 * MIB


@pytest.mark.parametrize("line", ["0::/nowhere", "no such line", ""])
def test_without_groups_the_machine_counts(tmp_path: Path, line: str) -> None:
    assert free_bytes(tmp_path, member(tmp_path, line)) == 1000 * MIB
    assert free_bytes(tmp_path, tmp_path / "missing") == 1000 * MIB


def test_a_group_beyond_its_limit_has_nothing_left(tmp_path: Path) -> None:
    group(tmp_path, str(50 * MIB), 60 * MIB)
    assert free_bytes(tmp_path, member(tmp_path, "0::/")) == 0
