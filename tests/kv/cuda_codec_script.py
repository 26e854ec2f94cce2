"""Compares the codecs of CUDA with those of the CPU; prints what differed as JSON. Argument: the device.

Its own process, because Triton decides at import whether it interprets kernels (TRITON_INTERPRET=1, on the CPU).
Needs no vLLM, so that it runs wherever torch and Triton do.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

from vllm_ext.config.kv_tier import LOSSLESS, QUANTISED
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kv.codec import QuantisedCodec, RawCodec
from vllm_ext.kv.cuda.codec import QuantisedCudaCodec, RawCudaCodec, StagedCodec, pieces_of
from vllm_ext.kv.cuda.device import CudaDevice, Device, PinnedMemory
from vllm_ext.kv.cuda.transfers import Transfers
from vllm_ext.kv.geometry import TierGeometry

BLOCKS, CHUNKS, LAYERS, RECORDS = 40, 12, 3, 6
GROUPS = [[0, 1, 2], [0, 2]]
COUNT = 7
_GAP = 192


class InstantDevice:
    """Does everything at once, and has no streams."""

    def new_stream(self, *, urgent: bool) -> int:
        return 0

    def record(self, stream: int | None) -> int:
        return 0

    def wait(self, stream: int, event: int) -> None:
        pass

    def launch(self, stream: int, work: object) -> None:
        assert callable(work)
        work()

    def is_through(self, event: int) -> bool:
        return True

    def synchronize(self, event: int) -> None:
        pass

    def elapsed_s(self, start: int, end: int) -> float:
        return 1e-3


def compare(layout: PageLayout, bits: int, device: str, *, together: bool) -> dict[str, float]:
    """Store 7 chunks by way of buffers for two, bring back some of them, and compare with the CPU's way."""
    generator = torch.Generator().manual_seed(layout.head_dim)
    shape = (BLOCKS, layout.page_elements)
    kv = [torch.randn(shape, generator=generator).to(layout.dtype) for _ in range(LAYERS)]
    kv[1][4, 3] = float("nan")
    there = [tensor.to(device).view(torch.int8) for tensor in kv]
    kv = [tensor.view(torch.int8) for tensor in kv]
    geometry = geometry_of(layout, bits)
    expected_pool = torch.zeros(CHUNKS * geometry.chunk_bytes, dtype=torch.uint8)
    pool = torch.zeros(CHUNKS, geometry.chunk_bytes + (0 if together else _GAP), dtype=torch.uint8)
    rows = pool[:, : geometry.chunk_bytes]
    pinned = PinnedMemory(rows) if device == "cuda" else None
    codec, reference = codecs(layout, bits, geometry, there, kv, rows, expected_pool)
    codec.prepare(GROUPS)
    unit: Device = CudaDevice(torch.device("cuda", 0)) if device == "cuda" else InstantDevice()
    transfers = Transfers(unit, codec)

    chunks = np.array([5, 6, 7, 2, 9, 0, 1])
    blocks = np.array([8, 4, 2, 17, 1, 0, 20])
    holds = np.ones(COUNT, np.bool_)
    for tensor in GROUPS[0]:
        holds &= reference.store(tensor, blocks, chunks)
    assert codec.chunks_per_piece == 2
    transfers.submit(1, pieces_of(codec, tuple(GROUPS[0]), chunks, blocks), is_load=False)
    transfers.wait({1})
    unreadable = transfers.take_failures().chunks

    wanted = np.array([30, 32, 35])
    for group, back in ((GROUPS[0], chunks[[3, 0, 4]]), (GROUPS[1], chunks[[5, 6, 3]])):
        for tensor in group:
            reference.load(tensor, back, wanted)
        transfers.submit(2, pieces_of(codec, tuple(group), back, wanted), is_load=True)
        transfers.wait({2})
        wanted = wanted - 6
    transfers.drain()
    differing = [
        int((mine.cpu().view(layout.dtype) - theirs.view(layout.dtype)).abs().nan_to_num(0).gt(0).sum())
        for mine, theirs in zip(there, kv, strict=True)
    ]
    if pinned is not None:
        pinned.close()
    good = chunks[holds]
    return {
        "holds": float(unreadable == set(chunks[~holds].tolist())),
        "unreadable": float(len(unreadable)),
        "bytes_that_differ": float(bytes_that_differ(layout, bits, rows, expected_pool, good)),
        "bytes_written_besides": float(pool[:, geometry.chunk_bytes :].any()) + float(rows[[3, 4, 8, 10, 11]].any()),
        "values_that_differ": float(sum(differing)),
        "largest_relative_difference": max(
            largest(mine, theirs, layout) for mine, theirs in zip(there, kv, strict=True)
        ),
        "pinned": float(pinned is not None and not pinned.pinned),
    }


def copy_records(layout: PageLayout, device: str) -> dict[str, float]:
    """Store blocks and records of the device in one job; a record, one layer of which holds nothing, is told of."""
    geometry, fmt = geometry_of(layout, QUANTISED), RecordFormat(layout)
    kv = [torch.zeros(BLOCKS, layout.page_elements, dtype=layout.dtype, device=device).view(torch.int8)] * LAYERS
    arena = torch.zeros(LAYERS, RECORDS + 1, fmt.record_bytes, dtype=torch.uint8)[:, 1:]  # layers lie apart
    arena[..., : fmt.codes_bytes] = torch.randint(0, 255, (LAYERS, RECORDS, fmt.codes_bytes), dtype=torch.uint8)
    minima = arena[1, 4, fmt.minima_offset : fmt.scales_offset]
    minima.copy_(torch.full((len(minima) // layout.dtype.itemsize,), torch.nan, dtype=layout.dtype).view(torch.uint8))
    pool = torch.full((CHUNKS, geometry.chunk_bytes), 0xAB, dtype=torch.uint8)
    size = 2 * geometry.chunk_bytes
    codec = QuantisedCudaCodec(kv, pool, geometry, layout, arena.to(device), staging_bytes=size)
    codec.prepare(GROUPS)
    transfers = Transfers(CudaDevice(torch.device("cuda", 0)) if device == "cuda" else InstantDevice(), codec)
    blocks, chunks = np.array([BLOCKS + 3, 7, BLOCKS, BLOCKS + 4, BLOCKS + 1]), np.array([5, 6, 0, 1, 2])
    transfers.submit(1, pieces_of(codec, tuple(GROUPS[0]), chunks, blocks), is_load=False)
    transfers.wait({1})
    of_records = [(chunk, block - BLOCKS) for chunk, block in zip(chunks, blocks, strict=True) if block >= BLOCKS]
    return {
        "records_that_differ": float(sum(not pool[c].equal(arena[:, r].flatten()) for c, r in of_records)),
        "blocks_that_differ": float(pool[6].eq(0xAB).all()),
        "written_besides": float(pool[[3, 4, *range(7, CHUNKS)]].ne(0xAB).any()),
        "told_of_others": float(transfers.take_failures().chunks != {1}),
    }


def geometry_of(layout: PageLayout, bits: int) -> TierGeometry:
    """Return the geometry of a chunk of all layers."""
    if bits == QUANTISED:
        record = RecordFormat(layout).record_bytes
        return TierGeometry(bits=bits, chunk_bytes=LAYERS * record, record_bytes=record)
    return TierGeometry(bits=bits, chunk_bytes=LAYERS * layout.page_bytes + 64, record_bytes=0)


def codecs(
    layout: PageLayout, bits: int, geometry: TierGeometry, there: list[torch.Tensor], kv: list[torch.Tensor],
    rows: torch.Tensor, expected_pool: torch.Tensor,
) -> tuple[StagedCodec, RawCodec | QuantisedCodec]:  # fmt: skip
    """Return the device's codec, with buffers for two chunks, and the CPU's."""
    size = 2 * geometry.chunk_bytes + 5
    if bits == QUANTISED:
        mine = QuantisedCudaCodec(there, rows, geometry, layout, staging_bytes=size)
        return mine, QuantisedCodec(kv, expected_pool, geometry, layout)
    return RawCudaCodec(there, rows, geometry, staging_bytes=size), RawCodec(kv, expected_pool, geometry)


def bytes_that_differ(
    layout: PageLayout, bits: int, rows: torch.Tensor, expected_pool: torch.Tensor, good: np.ndarray
) -> int:
    """Count bytes of chunks that hold, without those between the parts of a record."""
    fmt = RecordFormat(layout)
    size = fmt.record_bytes if bits == QUANTISED else layout.page_bytes
    found, expected = (
        pool[good][:, : LAYERS * size].reshape(len(good), LAYERS, size)
        for pool in (rows, expected_pool.view(rows.shape))
    )
    matters = torch.ones(size, dtype=torch.bool)
    if bits == QUANTISED:
        matters[2 * fmt.scales_offset - fmt.minima_offset :] = False
        matters[fmt.codes_bytes : fmt.minima_offset] = False
    return int(((found != expected) & matters).sum())


def largest(mine: torch.Tensor, theirs: torch.Tensor, layout: PageLayout) -> float:
    """Return the largest relative difference; -0.0 and 0.0 are equal, and so are NaN."""
    a, b = mine.cpu().view(layout.dtype).double(), theirs.view(layout.dtype).double()
    return float(((a - b).abs() / b.abs().clamp(min=1e-30)).nan_to_num(0).max())


def main(device: str) -> None:
    """Compare types, layouts and pools."""
    found = {
        f"{bits} bits {dtype} {make.__name__} {'together' if together else 'apart'}": compare(
            make(dtype, 2, dim, size), bits, device, together=together
        )
        for bits in (LOSSLESS, QUANTISED)
        for dtype, make, dim, size, together in (
            (torch.bfloat16, PageLayout.rows, 16, 16, True),
            (torch.float16, PageLayout.transposed_keys, 24, 4, False),
        )
    }
    layout = PageLayout.rows(torch.bfloat16, 2, 16, 16)
    print(json.dumps({"codecs": found, "records": copy_records(layout, device)}))


if __name__ == "__main__":
    main(sys.argv[1])
