"""A host tier over random KV on a device, and the check that it keeps its bytes; part of `kv_tier_cuda.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import checkout  # noqa: F401 - before all that it makes importable
import numpy as np
import torch

from vllm_ext.config.kv_tier import LOSSLESS, QUANTISED
from vllm_ext.kernels.kv_quant import reference
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kv.cuda.codec import Ids, Piece, QuantisedCudaCodec, RawCudaCodec, StagedCodec
from vllm_ext.kv.cuda.device import CudaDevice, Device, PinnedMemory
from vllm_ext.kv.cuda.transfers import Transfers
from vllm_ext.kv.host.geometry import TierGeometry
from vllm_ext.kv.host.report import WorkerReport


@dataclass(frozen=True, kw_only=True)
class Shape:
    """KV of a model; by default Llama-3.1-8B's."""

    blocks: int
    """Half of them are stored from, the other half is loaded into."""
    layers: int = 32
    heads: int = 8
    head_dim: int = 128
    block_size: int = 32
    dtype: torch.dtype = torch.bfloat16

    @property
    def layout(self) -> PageLayout:
        """Of a page, as vLLM's CUDA backends have it."""
        return PageLayout.rows(self.dtype, self.heads, self.head_dim, self.block_size)

    def geometry(self, bits: int) -> TierGeometry:
        """Of a chunk with so many bits."""
        record = RecordFormat(self.layout).record_bytes if bits == QUANTISED else 0
        size = self.layers * (record or self.layout.page_bytes)
        return TierGeometry(bits=bits, chunk_bytes=size, record_bytes=record)


class InstantDevice:
    """Does everything at once; for a try without a GPU, whose numbers mean nothing."""

    def new_stream(self, *, urgent: bool) -> int:
        return 0

    def record(self, stream: int | None) -> float:
        return time.perf_counter()

    def wait(self, stream: int, event: float) -> None:
        pass

    def launch(self, stream: int, work: Callable[[], None]) -> None:
        work()

    def is_through(self, event: float) -> bool:
        return True

    def synchronize(self, event: float) -> None:
        pass

    def elapsed_s(self, start: float, end: float) -> float:
        return end - start


class Tier:
    """KV of all layers in one allocation, a pool for half of it, and what copies.

    Args:
        shape: Of the KV.
        bits: 16 or 8.
        where: "cuda", or "cpu" for a try.
        seed: Of the values and of the order of blocks and chunks.
        pins: Pin the pool.
        loads_first: See `Transfers`.
    """

    def __init__(
        self, shape: Shape, bits: int, where: str, seed: int, *, pins: bool = True, loads_first: bool = True
    ) -> None:
        self.shape, self.bits, self.where = shape, bits, where
        self.geometry = shape.geometry(bits)
        generator = torch.Generator(where).manual_seed(seed)
        size = (shape.layers, shape.blocks, shape.layout.page_elements)
        self.kv = torch.empty(size, dtype=shape.dtype, device=where)
        for layer in self.kv:
            layer.normal_(generator=generator)
        self.num_chunks = shape.blocks // 2
        self.pool = torch.zeros(self.num_chunks, self.geometry.chunk_bytes, dtype=torch.uint8)
        self.memory = PinnedMemory(self.pool) if pins and where == "cuda" else None
        self.device: Device = CudaDevice(torch.device("cuda", 0)) if where == "cuda" else InstantDevice()
        self.codec = self._codec()
        self.codec.prepare([range(shape.layers)])
        self.transfers = Transfers(self.device, self.codec, loads_first=loads_first)
        order = np.random.default_rng(seed)
        self.chunks = order.permutation(self.num_chunks)
        self.sources = order.permutation(self.num_chunks)
        self.targets = self.num_chunks + order.permutation(self.num_chunks)
        self._jobs = 0

    @property
    def kv_bytes_per_chunk(self) -> int:
        """Bytes of KV that a chunk stands for."""
        return self.shape.layers * self.shape.layout.page_bytes

    def submit(self, *, is_load: bool, count: int | None = None, times: int = 1) -> int:
        """Begin to store the first half, or to load into the second, over and over; return the job's id."""
        self._jobs += 1
        blocks = self.targets if is_load else self.sources
        pieces = list(self.pieces(self.chunks[:count], blocks[:count]))
        self.transfers.submit(self._jobs, pieces * times, is_load=is_load)
        return self._jobs

    def pieces(self, chunks: Ids, blocks: Ids) -> Iterator[Piece]:
        """Cut a job into pieces."""
        size = self.codec.chunks_per_piece
        for i in range(0, len(chunks), size):
            yield Piece(tuple(range(self.shape.layers)), chunks[i : i + size], blocks[i : i + size])

    def sync(self) -> None:
        """Wait for the device."""
        if self.where == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        """Finish, and give memory back."""
        self.transfers.drain()
        if self.memory is not None:
            self.memory.close()

    def _codec(self) -> StagedCodec:
        pages = [layer.view(torch.int8) for layer in self.kv]
        if self.bits == QUANTISED:
            return QuantisedCudaCodec(pages, self.pool, self.geometry, self.shape.layout)
        return RawCudaCodec(pages, self.pool, self.geometry)


def wrong_bytes(tier: Tier, sample: int = 2) -> int:
    """Store all, load all, and count bytes that are not what they must be.

    At 16 bits of all that came back; with 8 of some chunks, against the definition, which is slow: their records, and
    what came back of them.
    """
    for is_load in (False, True):
        tier.submit(is_load=is_load)
        tier.transfers.drain()
    if tier.transfers.take_report() != WorkerReport() or any(job.failed for job in tier.transfers.take_ended()):
        raise RuntimeError("a copy failed")
    if tier.bits == LOSSLESS:
        sources, targets = (torch.from_numpy(ids) for ids in (tier.sources, tier.targets))
        return sum(_differing(layer[targets], layer[sources]) for layer in tier.kv)
    return sum(_wrong_records(tier, layer, sample) for layer in (0, tier.shape.layers - 1))


def _wrong_records(tier: Tier, layer: int, sample: int) -> int:
    fmt = RecordFormat(tier.shape.layout)
    picked = [0, tier.num_chunks - 1][:sample]
    kv = tier.kv[layer].cpu()
    expected, _ = reference.quantise(kv, torch.from_numpy(tier.sources[picked]), fmt)
    found = tier.pool.view(tier.num_chunks, -1, fmt.record_bytes)[tier.chunks[picked], layer]
    end = 2 * fmt.scales_offset - fmt.minima_offset
    back, targets = torch.zeros_like(kv), torch.from_numpy(tier.targets[picked])
    reference.dequantise(expected, back, targets, fmt)
    return _differing(found[:, :end], expected[:, :end]) + _differing(kv[targets], back[targets])


def _differing(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum())
