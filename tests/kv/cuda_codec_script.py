"""Compares the codecs of CUDA with those of the CPU, case by case (`comparison`). Argument: the device.

Its own process, because Triton decides at import whether it interprets kernels (TRITON_INTERPRET=1, on the CPU).
Needs no vLLM, so that it runs wherever torch and Triton do.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[2]))

from tests.kv.fake_device import TimedDevice
from tests.support.comparison import Facts, compare
from vllm_ext.config.kv_tier import LOSSLESS, QUANTISED
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kv.cuda.codec import QuantisedCudaCodec, RawCudaCodec, StagedCodec, pieces_of
from vllm_ext.kv.cuda.device import CudaDevice, Device, PinnedMemory
from vllm_ext.kv.cuda.transfers import Transfers
from vllm_ext.kv.host.codec import QuantisedCodec, RawCodec
from vllm_ext.kv.host.geometry import TierGeometry

BLOCKS, CHUNKS, LAYERS = 40, 12, 3
GROUPS = [[0, 1, 2], [0, 2]]
COUNT = 7
_GAP = 192


def errors(layout: PageLayout, bits: int, device: str, *, together: bool) -> Facts:
    """Store 7 chunks by way of buffers for two, bring back some of them, and compare with the CPU's way."""
    generator = torch.Generator().manual_seed(layout.head_dim)
    shape = (BLOCKS, layout.page_elements)
    kv = [torch.randn(shape, generator=generator).to(layout.dtype) for _ in range(LAYERS)]
    kv[1][4, 3] = float("nan")
    kv = [tensor.view(torch.int8) for tensor in kv]
    there = [torch.zeros_like(tensor, device=device) for tensor in kv]
    geometry = geometry_of(layout, bits)
    expected_pool = torch.zeros(CHUNKS * geometry.chunk_bytes, dtype=torch.uint8)
    pool = torch.zeros(CHUNKS, geometry.chunk_bytes + (0 if together else _GAP), dtype=torch.uint8)
    rows = pool[:, : geometry.chunk_bytes]
    pinned = PinnedMemory(rows) if device == "cuda" else None
    codec, reference = codecs(layout, bits, geometry, there, kv, rows, expected_pool)
    codec.prepare(GROUPS)  # writes into a block, as before there is any KV
    for mine, theirs in zip(there, kv, strict=True):
        mine.copy_(theirs)
    unit: Device = CudaDevice(torch.device("cuda", 0)) if device == "cuda" else TimedDevice()
    transfers = Transfers(unit, codec)

    chunks = np.array([5, 6, 7, 2, 9, 0, 1])
    blocks = np.array([8, 4, 2, 17, 1, 0, 20])
    holds = np.ones(COUNT, np.bool_)
    for tensor in GROUPS[0]:
        holds &= reference.store(tensor, blocks, chunks)
    assert codec.chunks_per_piece == 2
    transfers.submit(1, pieces_of(codec, tuple(GROUPS[0]), chunks, blocks), is_load=False)
    transfers.wait({1})
    unreadable = transfers.take_report().chunks
    refused = set(chunks[~holds].tolist())

    wanted = np.array([30, 32, 35])
    for group, back in ((GROUPS[0], chunks[[3, 0, 4]]), (GROUPS[1], chunks[[5, 6, 3]])):
        for tensor in group:
            reference.load(tensor, back, wanted)
        transfers.submit(2, pieces_of(codec, tuple(group), back, wanted), is_load=True)
        transfers.wait({2})
        wanted = wanted - 6
    transfers.drain()
    off = torch.cat([relative_differences(mine, theirs, layout) for mine, theirs in zip(there, kv, strict=True)])
    not_pinned = pinned is not None and not pinned.pinned
    if pinned is not None:
        pinned.close()
    good = chunks[holds]
    return {
        "unreadable_differ": float(unreadable != refused or len(refused) != (bits == QUANTISED)),  # one holds a NaN
        "bytes_that_differ": float(bytes_that_differ(layout, bits, rows, expected_pool, good)),
        "bytes_written_besides": float(pool[:, geometry.chunk_bytes :].any()) + float(rows[[3, 4, 8, 10, 11]].any()),
        "values_that_differ": float(off.gt(0).sum()),
        "largest_relative_difference": float(off.max()),
        "not_pinned": float(not_pinned),
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


def relative_differences(mine: torch.Tensor, theirs: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """Return those of every value; -0.0 and 0.0 are equal, and so are NaN, of which one alone is infinitely far off."""
    a, b = mine.cpu().view(layout.dtype).double(), theirs.view(layout.dtype).double()
    same = (a == b) | (a.isnan() & b.isnan())
    return ((a - b).abs() / b.abs().clamp(min=1e-30)).masked_fill(same, 0.0).nan_to_num(torch.inf)


def over(name: str, facts: Facts, *, device: str) -> list[str]:
    """Return what differs, but for the last bit of bfloat16 in 8 bits where Triton interprets.

    Where a GPU rounds to the nearest, its interpreter cuts.
    """
    exact = device == "cuda" or f"{QUANTISED} bits torch.bfloat16" not in name
    eps = torch.finfo(torch.bfloat16).eps
    allowed = {} if exact else {"largest_relative_difference": eps, "values_that_differ": np.inf}
    return [fact for fact, value in facts.items() if not value <= allowed.get(fact, 0.0)]


def main(device: str) -> int:
    """Compare types, layouts and pools; return the exit status."""
    cases = {
        f"{bits} bits {dtype} {make.__name__} {'together' if together else 'apart'}": functools.partial(
            errors, make(dtype, 2, dim, size), bits, device, together=together
        )
        for bits in (LOSSLESS, QUANTISED)
        for dtype, make, dim, size, together in (
            (torch.bfloat16, PageLayout.rows, 16, 16, True),
            (torch.float16, PageLayout.transposed_keys, 24, 4, False),
        )
    }
    return compare(cases.items(), functools.partial(over, device=device))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
