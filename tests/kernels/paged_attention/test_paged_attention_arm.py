"""The kernel for the CPU compiles for Arm with the oldest g++ that is supported, and computes the same there.

With Debian's packages g++-aarch64-linux-gnu and qemu-user; without the second it is only compiled. A compiler of
another make would not do: clang takes what g++ 12 refuses.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.paged_attention.batches import Range, make_batch
from tests.kernels.paged_attention.test_paged_attention_cpu import DECODE, DTYPES, GAP, ODD, SUFFIXES, assert_right
from tests.support.extent import HANG_S
from vllm_ext.kernels import native
from vllm_ext.kernels.kv_quant import cpu as kv_quant
from vllm_ext.kernels.paged_attention import cpu

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
DRIVER = Path(__file__).with_name("emulated_call.cpp")
FLAGS = tuple(flag for flag in native.FLAGS if flag not in ("-march=native", "-shared"))
ALIGNED = 64
"""Bytes to which what a call points to is aligned in its file, as a tensor is."""
MANY = [Range(r.q_len, r.kv_len, int8=".x") for r in [*DECODE, *SUFFIXES, Range(70, 70)]]


@pytest.fixture(scope="module")
def compiler() -> str:
    if (found := shutil.which(COMPILER)) is None:
        pytest.skip(f"no {COMPILER} (Debian: apt install g++-aarch64-linux-gnu)")
    return found


@pytest.fixture(scope="module")
def driver(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel with a main function around it, for Arm."""
    made = tmp_path_factory.mktemp("arm") / "driver"
    compile_for_arm(compiler, DRIVER, made, "-static", *cpu.FLAGS, f"-I{cpu.SOURCE.parent}")
    return made


def compile_for_arm(compiler: str, source: Path, made: Path, *flags: str) -> None:
    command = [compiler, *FLAGS, *flags, "-o", str(made), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 0, done.stderr


class Emulated:
    """In the place of the library: each call is a process of the emulator."""

    def __init__(self, driver: Path) -> None:
        self._command = [EMULATOR, str(driver)]
        self._file = driver.with_name("call")

    def attend(self, reference: Any) -> int:
        call = reference._obj
        places, content = laid_out(call)
        self._file.write_bytes(content)
        done = subprocess.run([*self._command, str(self._file)], check=False, timeout=HANG_S)
        assert done.returncode == 0
        written = self._file.read_bytes()
        for name in ("out", "lse"):
            first, size = places[name]
            ctypes.memmove(getattr(call, name), written[first : first + size], size)
        return -1


def laid_out(call: Any) -> tuple[dict[str, tuple[int, int]], bytes]:
    """Return a call with all that it points to as bytes, and where and how large in them each thing is."""
    number = 4 if call.dtype == 0 else 2
    sizes = {
        "query": call.num_tokens * call.query_stride * number,
        "out": call.num_tokens * call.out_stride * number,
        "lse": call.num_tokens * call.num_heads * 4,
        "pages": call.num_blocks * call.page_stride * number,
        "records": call.num_records * call.record_bytes,
        "block_ids": call.num_block_ids * 4,
        "first_block": call.num_ranges * 8,
        **dict.fromkeys(("q_start", "q_len", "q_position", "kv_len"), call.num_ranges * 4),
    }
    moved = type(call).from_buffer_copy(call)
    places, at, parts = {}, ctypes.sizeof(call), []
    for name, size in sizes.items():
        gap = -at % ALIGNED
        places[name] = (at + gap, size)
        parts.append(bytes(gap) + ctypes.string_at(getattr(call, name), size))
        setattr(moved, name, at + gap)
        at += gap + size
    return places, bytes(moved) + b"".join(parts)


def test_codec_compiles_for_arm(compiler: str, tmp_path: Path) -> None:
    compile_for_arm(compiler, Path(kv_quant.__file__).with_name("cpu.cpp"), tmp_path / "codec.so", "-shared")


def test_kernel_compiles_for_arm(driver: Path) -> None:
    assert driver.stat().st_size > 0


@pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"no {EMULATOR} (Debian: apt install qemu-user)")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wanted", [MANY, GAP, ODD], ids=["records", "gap", "odd"])
def test_kernel_equals_its_definition_on_arm(
    dtype: torch.dtype, wanted: list[Range], driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "library", lambda: Emulated(driver))
    assert_right(make_batch(cpu.layout_for(dtype, 2, 64, 32), 8, wanted), scale=0.125, window=100, softcap=20.0)
