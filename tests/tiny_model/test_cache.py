"""The cache of built models: complete or absent, whatever interrupts a build or damages a file."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.extent import HANG_S
from vllm_ext.tiny_model.cache import MANIFEST, damage, obtain


def make_model(directory: Path) -> None:
    (directory / "weights").write_text("1 2 3")
    (directory / "config").write_text("{}")


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_second_call_does_not_build(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        raise AssertionError("built again")

    target = obtain(tmp_path / "model", make_model)
    assert obtain(tmp_path / "model", fail) == target
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("harm", [remove, truncate])
@pytest.mark.parametrize("name", ["weights", MANIFEST])
def test_damaged_copy_is_reported_set_aside_and_built_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: Callable[[Path], None], name: str
) -> None:
    target = obtain(tmp_path / "model", make_model)
    harm(target / name)
    assert obtain(tmp_path / "model", make_model) == target
    assert damage(target) is None
    report = capsys.readouterr().err
    assert name in report
    assert str(target) in report
    assert (tmp_path / "model.damaged-1" / "config").exists()


def test_every_damaged_copy_is_kept(tmp_path: Path) -> None:
    for _ in range(3):
        remove(obtain(tmp_path / "model", make_model) / "weights")
    obtain(tmp_path / "model", make_model)
    assert {path.name for path in tmp_path.glob("*.damaged-*")} == {f"model.damaged-{n}" for n in (1, 2, 3)}


def test_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        make_model(directory)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        obtain(tmp_path / "model", fail)
    assert list(tmp_path.iterdir()) == []


def test_concurrent_builders_end_with_one_complete_copy(tmp_path: Path) -> None:
    barrier = threading.Barrier(4, timeout=HANG_S)
    results: list[Path] = []

    def slow(directory: Path) -> None:
        make_model(directory)
        barrier.wait()  # nobody finishes before everybody has built

    threads = [threading.Thread(target=lambda: results.append(obtain(tmp_path / "model", slow))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [tmp_path / "model"] * 4
    assert damage(tmp_path / "model") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
