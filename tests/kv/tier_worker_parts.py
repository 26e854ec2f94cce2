"""Host tiers over random KV, for tests of what copies do."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping, Sequence
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

from vllm_ext.config.kv_tier import LOSSLESS, QUANTISED
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kv.host.codec import Codec, Ids, QuantisedCodec, RawCodec
from vllm_ext.kv.host.geometry import TierGeometry
from vllm_ext.kv.host.layout import PackedPages

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


class SlowCodec:
    """Copies nothing, notes who came, and waits where it is told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.may_go = threading.Event()
        self.came = threading.Event()
        self.fails: set[int] = set()
        self.unreadable: set[int] = set()

    def store(self, tensor: int, blocks: Ids, chunks: Ids) -> np.ndarray:
        self._come("store", chunks)
        return np.array([chunk not in self.unreadable for chunk in chunks.tolist()])

    def load(self, tensor: int, chunks: Ids, blocks: Ids) -> None:
        self._come("load", chunks)

    def _come(self, direction: str, chunks: Ids) -> None:
        self.calls.append((direction, chunks.tolist()))
        self.came.set()
        assert self.may_go.wait(10)
        if self.fails & set(chunks.tolist()):
            raise OSError("injected: no such chunk")
