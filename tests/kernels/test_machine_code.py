"""Compiled code on disk: it is found again, also by another process, and nothing about the folder breaks anything."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch

from tests.extent import HANG_S
from vllm_ext.kernels.kv_quant import cpu, machine_code
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat

SIGNATURE = numba.void(numba.types.CPointer(numba.float32), numba.intp, numba.intp)


def ramp(numbers: Any, count: Any, step: Any) -> None:
    """Count up; the temporary array needs numba's runtime."""
    made = np.arange(count) * step
    for i in range(count):
        numbers[i] = made[i]


def ramped(made_for: tuple[object, ...] = (1,)) -> list[float]:
    """What the C function writes."""
    found = np.zeros(4, np.float32)
    machine_code.function("ramp", ramp, SIGNATURE, made_for)(found.ctypes.data, 4, 3)
    return found.tolist()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("VLLM_EXT_CACHE", str(tmp_path))
    return tmp_path / "machine-code"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is compiled."""
    names: list[str] = []
    compile_ = numba.cfunc

    def counted(signature: Any) -> Any:
        return lambda kernel: (names.append(kernel.__name__), compile_(signature)(kernel))[1]

    monkeypatch.setattr(numba, "cfunc", counted)
    return names


def test_what_was_compiled_is_read_the_next_time(folder: Path, compilations: list[str]) -> None:
    assert ramped() == ramped() == [0, 3, 6, 9]
    assert compilations == ["ramp"]
    assert ramped((2,)) == [0, 3, 6, 9]
    assert compilations == ["ramp", "ramp"]
    assert len(list(folder.iterdir())) == 2, "one file for each, and nothing else"


DAMAGES = {
    "truncated": lambda content: content[:-1],
    "head only": lambda content: content[:40],
    "empty": lambda content: b"",
    "changed": lambda content: content[:99] + b"!" + content[100:],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_compiled_again(
    folder: Path, compilations: list[str], caplog: pytest.LogCaptureFixture, damage: Any
) -> None:
    ramped()
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING, machine_code.logger.name):
        assert ramped() == ramped() == [0, 3, 6, 9]
    assert "is damaged, or another user's" in caplog.text
    assert compilations == ["ramp", "ramp"], "and written again"
    assert list(folder.iterdir()) == [path]


def test_another_users_code_is_not_run(compilations: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ramped()
    monkeypatch.setattr(machine_code.os, "geteuid", lambda: 12345)
    assert ramped() == [0, 3, 6, 9]
    assert compilations == ["ramp", "ramp"]


def test_without_a_folder_everything_is_compiled(
    folder: Path, compilations: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("in the way")
    with caplog.at_level(logging.WARNING, machine_code.logger.name):
        assert ramped() == ramped() == [0, 3, 6, 9]
    assert compilations == ["ramp", "ramp"]
    assert "is not kept for other processes" in caplog.text


def test_without_a_home_everything_is_compiled(compilations: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(machine_code.envs, "cache_dir", homeless)
    assert ramped() == ramped() == [0, 3, 6, 9]
    assert compilations == ["ramp", "ramp"]


def test_a_failed_write_leaves_nothing_behind(
    folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(machine_code.os, "replace", full)
    assert ramped() == [0, 3, 6, 9]
    assert list(folder.iterdir()) == []


CHILD = """
import sys
import numba, numpy as np, torch
from vllm_ext.kernels.kv_quant import cpu
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat

del numba.cfunc  # nothing can be compiled
layout = PageLayout.transposed_keys(torch.bfloat16, 1, 4, 4)
fmt = RecordFormat(layout, 1)
pages = torch.arange(layout.page_elements).bfloat16()[None]
records = torch.zeros(1, fmt.record_bytes, dtype=torch.uint8)
ids, slots = np.array([[0]]), np.array([0])
assert cpu.quantise(pages, ids, records, slots, fmt).all()
print(bytes(records.numpy()).hex())
cpu.dequantise(records, slots, pages, ids, fmt)
print(pages.float().sum().item())
"""


def test_another_process_runs_a_codec_that_this_one_compiled(compilations: list[str]) -> None:
    layout = PageLayout.transposed_keys(torch.bfloat16, 1, 4, 4)
    fmt = RecordFormat(layout, 1)
    pages = torch.arange(layout.page_elements).bfloat16()[None]
    records = torch.zeros(1, fmt.record_bytes, dtype=torch.uint8)
    ids, slots = np.array([[0]]), np.array([0])
    cpu._kernels.cache_clear()
    cpu._compiled.cache_clear()
    assert cpu.quantise(pages, ids, records, slots, fmt).all()
    expected = bytes(records.numpy()).hex()
    cpu.dequantise(records, slots, pages, ids, fmt)
    assert compilations == ["entry", "entry"]
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [expected, str(pages.float().sum().item())]
