"""Host tiers over random KV, for tests of what copies do."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from tests.support.extent import HANG_S
from vllm_ext.config.kv_tier import LOSSLESS, QUANTISED
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kv.host.codec import Codec, Ids, QuantisedCodec, RawCodec
from vllm_ext.kv.host.geometry import TierGeometry
from vllm_ext.kv.host.layout import PackedPages
from vllm_ext.kv.host.worker import TierWorker

LAYOUT = PageLayout.transposed_keys(torch.bfloat16, 2, 8, 4)


def offloading_config(
    extra: Mapping[str, Any], *, layers: Sequence[int] = (2,), block_sizes: Sequence[int] = (4,),
    page_bytes: int = LAYOUT.page_bytes, dtype: str = "bfloat16", world_size: int = 1, dcp: int = 1,
) -> OffloadingConfig:  # fmt: skip
    """What vLLM tells a spec of groups of so many layers, in blocks of so many tokens; by default of `random_kv`."""
    groups = tuple(
        OffloadingGroupConfig(tokens_per_block=size, layer_names=tuple(f"{g}.{i}" for i in range(count)), group_id=g)
        for g, (count, size) in enumerate(zip(layers, [*block_sizes] * len(layers), strict=False))
    )
    return OffloadingConfig(
        groups=groups,
        worker_kv_bytes_per_block=max(layers) * page_bytes,
        enable_kv_cache_events=False,
        extra_config=extra,
        engine_id=str(uuid.uuid4()),
        model=OffloadingModelConfig(name="some/model", dtype=dtype),
        cache=OffloadingCacheConfig(tokens_per_hash=4, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(0, world_size, world_size, 1, 1, dcp, 0, 1, None, True),
    )


def random_kv(num_tensors: int = 2, num_blocks: int = 12, seed: int = 0) -> list[torch.Tensor]:
    """Caches as vLLM's connector hands them over: shape [num_blocks, page_bytes], int8."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks, LAYOUT.page_elements)
    return [torch.randn(shape, generator=generator).to(LAYOUT.dtype).view(torch.int8) for _ in range(num_tensors)]


def geometry(bits: int, num_tensors: int = 2) -> TierGeometry:
    """Of chunks over `random_kv`."""
    if bits == LOSSLESS:
        return TierGeometry(bits=bits, chunk_bytes=num_tensors * LAYOUT.page_bytes, record_bytes=0)
    record = RecordFormat(LAYOUT).record_bytes
    return TierGeometry(bits=bits, chunk_bytes=num_tensors * record, record_bytes=record)


def codec(
    bits: int,
    kv: Sequence[torch.Tensor],
    *,
    num_chunks: int = 6,
    layout: PageLayout | PackedPages = LAYOUT,
) -> Codec:
    """A codec with a pool of its own, full of rubbish."""
    size = geometry(bits, len(kv))
    pool = torch.full((num_chunks * size.chunk_bytes,), 0xAB, dtype=torch.uint8)
    return QuantisedCodec(kv, pool, size, layout) if bits == QUANTISED else RawCodec(kv, pool, size)


def device(blocks: Sequence[int], index: int = 0) -> GPULoadStoreSpec:
    """Blocks of one group, the first of which is the request's block ``index``."""
    return GPULoadStoreSpec(list(blocks), group_sizes=[len(blocks)], block_indices=[index])


def host(chunks: Sequence[int]) -> CPULoadStoreSpec:
    """Chunks of the pool."""
    return CPULoadStoreSpec(list(chunks))


class SteppedCodec:
    """Copies nothing; each call waits for its turn, and is noted as (direction, tensor, chunks)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, list[int]]] = []
        self.fails: set[tuple[int, int]] = set()
        """(tensor, chunk)."""
        self.unreadable: set[int] = set()
        self._came = threading.Semaphore(0)
        self._turns = threading.Semaphore(0)

    def go(self, times: int = 1000) -> None:
        """Let so many calls through."""
        self._turns.release(times)

    def wait_for_calls(self, times: int = 1) -> None:
        for _ in range(times):
            assert self._came.acquire(timeout=HANG_S)

    def store(self, tensor: int, blocks: Ids, chunks: Ids) -> np.ndarray:
        self._call("store", tensor, chunks.tolist())
        return np.array([chunk not in self.unreadable for chunk in chunks.tolist()])

    def load(self, tensor: int, chunks: Ids, blocks: Ids) -> None:
        self._call("load", tensor, chunks.tolist())

    def _call(self, direction: str, tensor: int, chunks: list[int]) -> None:
        self.calls.append((direction, tensor, chunks))
        self._came.release()
        assert self._turns.acquire(timeout=HANG_S)
        if any((tensor, chunk) in self.fails for chunk in chunks):
            raise OSError("injected: no such chunk")


Stepped = tuple[SteppedCodec, TierWorker]


def stepped_worker(layers: int) -> Iterator[Stepped]:
    """A worker of so many tensors whose copies wait for their turns; let go and ended behind the test."""
    copies = SteppedCodec()
    worker = TierWorker(copies, [range(layers)], chunk_bytes=100)
    yield copies, worker
    copies.go()
    worker.shutdown()
