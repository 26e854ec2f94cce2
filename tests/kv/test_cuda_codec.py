"""KV on a CUDA device and KV on the CPU look the same in host memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.compared import compared
from tests.support.extent import HANG_S
from vllm_ext.config.kv_tier import LOSSLESS, QUANTISED
from vllm_ext.kernels.kv_quant.format import PageLayout
from vllm_ext.kv.cuda.codec import Piece, QuantisedCudaCodec, RawCudaCodec
from vllm_ext.kv.cuda.device import PinnedMemory

from .tier_worker_parts import LAYOUT, geometry, random_kv

SCRIPT = Path(__file__).with_name("cuda_codec_script.py")


CASES = 4
SPOILT = """
from tests.kv import cuda_codec_script as script
unpack = script.StagedCodec.unpack
def spoilt(self, piece, buffer, slot):
    unpack(self, piece, buffer, slot)
    for tensor in piece.tensors:
        self._tensors[tensor][piece.blocks, 1] ^= 0x40
script.StagedCodec.unpack = spoilt
raise SystemExit(script.main("cpu"))
"""


def test_interpreted_copies_are_those_of_the_cpu() -> None:
    found = compared(str(SCRIPT), "cpu", TRITON_INTERPRET="1")
    assert found.holds, json.dumps(found.cases)
    assert len(found.cases) == CASES


def test_a_byte_that_comes_back_wrong_is_found() -> None:
    """In every case that loads; and the exit status says so."""
    found = compared("-c", SPOILT, TRITON_INTERPRET="1")
    assert found.status == 1
    assert found.end == {"wrong": list(found.cases), "failed": [], "cases": CASES}


@pytest.mark.parametrize(
    "module", ["tests.kv.cuda_codec_script", "tests.kv.test_cuda_gpu", "tests.cellular.test_graphed"]
)
def test_what_a_machine_with_a_gpu_runs_needs_no_vllm(module: str) -> None:
    """There may be torch and Triton only."""
    without = "import sys; sys.modules['vllm'] = None; import importlib; importlib.import_module(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", without, module], cwd=SCRIPT.parents[2], capture_output=True, text=True, timeout=HANG_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_of_a_gpu_are_those_of_the_cpu() -> None:
    found = compared(str(SCRIPT), "cuda")
    assert found.holds, json.dumps(found.cases)


def pool_for(bits: int, num_tensors: int = 2) -> torch.Tensor:
    return torch.zeros(6, geometry(bits, num_tensors).chunk_bytes, dtype=torch.uint8)


def test_pages_that_several_layers_share_are_refused() -> None:
    """As in vLLM's layouts with blocks outside of layers, were each layer looked at on its own."""
    packed = torch.zeros(12, 2 * LAYOUT.page_bytes, dtype=torch.int8)
    layers = [packed[:, : LAYOUT.page_bytes], packed[:, LAYOUT.page_bytes :]]
    with pytest.raises(ValueError, match="bytes apart"):
        RawCudaCodec(layers, pool_for(LOSSLESS), geometry(LOSSLESS))
    with pytest.raises(ValueError, match="bytes apart"):
        QuantisedCudaCodec(layers, pool_for(QUANTISED), geometry(QUANTISED), LAYOUT)


def test_a_page_of_all_layers_cannot_be_quantised_but_copied() -> None:
    """As vLLM's connector hands such layouts over."""
    packed = [torch.zeros(12, 2 * LAYOUT.page_bytes, dtype=torch.int8)]
    with pytest.raises(ValueError, match="their layout has"):
        QuantisedCudaCodec(packed, pool_for(QUANTISED), geometry(QUANTISED), LAYOUT)
    assert RawCudaCodec(packed, pool_for(LOSSLESS), geometry(LOSSLESS)).chunks_per_piece > 1


def test_a_chunk_smaller_than_the_workers_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="this worker's blocks take"):
        RawCudaCodec(random_kv(num_tensors=3), pool_for(LOSSLESS), geometry(LOSSLESS))


@pytest.mark.parametrize(
    "pool",
    [torch.zeros(100, dtype=torch.uint8), torch.zeros(4, 7, dtype=torch.uint8)],
    ids=["one dimension", "chunks of another size"],
)
def test_a_pool_that_is_not_of_chunks_is_refused(pool: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="pool: must be"):
        RawCudaCodec(random_kv(), pool, geometry(LOSSLESS))


def test_a_layout_that_the_scheduler_does_not_count_with_is_refused() -> None:
    other = PageLayout.rows(torch.bfloat16, 2, 16, 4)
    with pytest.raises(ValueError, match="record_bytes"):
        QuantisedCudaCodec(random_kv(), pool_for(QUANTISED), geometry(QUANTISED), other)


@pytest.mark.parametrize(
    ("apart", "copies"),
    [(False, [(0, 3, 3), (3, 0, 1), (4, 7, 2), (6, 1, 1)]), (True, [(i, c, 1) for i, c in enumerate(
        (3, 4, 5, 0, 7, 8, 1))])],
    ids=["together", "apart"],
)  # fmt: skip
def test_chunks_that_follow_each_other_are_one_copy(apart: bool, copies: list[tuple[int, int, int]]) -> None:
    size = geometry(LOSSLESS)
    pool = torch.zeros(9, size.chunk_bytes + 64 * apart, dtype=torch.uint8)[:, : size.chunk_bytes]
    codec = RawCudaCodec(random_kv(), pool, size)
    chunks = np.array([3, 4, 5, 0, 7, 8, 1])
    assert list(codec._runs(chunks)) == copies
    assert codec.copies(Piece((0, 1), chunks, chunks)) == len(copies)


def test_a_buffer_is_bounded_but_holds_a_chunk() -> None:
    size = geometry(LOSSLESS)
    for limit, chunks in ((1, 1), (3 * size.chunk_bytes - 1, 2)):
        codec = RawCudaCodec(random_kv(), pool_for(LOSSLESS), size, staging_bytes=limit)
        assert codec.new_buffer().rows.shape == (chunks, size.chunk_bytes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_memory_that_cannot_be_pinned_is_used_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="vllm.vllm_ext.kv"):
        memory = PinnedMemory(torch.zeros(64, dtype=torch.uint8))
    assert not memory.pinned
    memory.close()
    assert not memory.pinned
