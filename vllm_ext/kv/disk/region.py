"""Host memory that the scheduler's process and the workers share, so that the first can copy it to disk and back.

vLLM's `SharedOffloadRegion`, a file in /dev/shm. A row is a chunk, and a worker's share of it lies at its rank:

    row of chunk c:   worker 0 | worker 1 | ... | rest up to whole pages

The workers are built first, and each signs its share. The scheduler's process looks for the signatures: a worker on
another machine would have a file of its own, and chunks would be saved without its share. Then it removes the file's
name, so that the memory goes with the last process, however that ends.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import shutil
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from vllm_ext.config.errors import ConfigError
from vllm_ext.kv.host.geometry import TierGeometry
from vllm_ext.kv.host.memory import free_bytes

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig

_SHARED_MEMORY = "/dev/shm"


class SharedRows:
    """The memory as one process sees it, once it is opened.

    Attributes:
        row_bytes: Of a chunk of all workers: whole pages, and whole records where there are any.
    """

    def __init__(self, config: OffloadingConfig, geometry: TierGeometry) -> None:
        self._config, self._share_bytes = config, geometry.chunk_bytes
        unit = math.lcm(mmap.PAGESIZE, geometry.record_bytes or 1)
        self.row_bytes = -(-geometry.chunk_bytes * config.parallel.world_size // unit) * unit
        self._region: SharedOffloadRegion | None = None

    def open_share(self, num_chunks: int) -> torch.Tensor:
        """Open the memory in a worker, and sign its share.

        Returns:
            Shape [bytes], uint8: the worker's share of chunk c begins at ``c * row_bytes``.

        Raises:
            ConfigError: there is not enough memory.
        """
        rank = self._config.parallel.rank
        self._region = self._open(num_chunks, rank)
        share = self._memory(self._region, rank)
        share[: len(_signature(rank))] = torch.frombuffer(_signature(rank), dtype=torch.uint8)
        return share

    def open_all(self, num_chunks: int) -> SharedOffloadRegion:
        """Open the memory in the scheduler's process, after all workers did.

        Raises:
            ConfigError: a worker does not share it.
        """
        region = self._open(num_chunks, None)
        for rank in range(self._config.parallel.world_size):
            signature = _signature(rank)
            if self._memory(region, rank)[: len(signature)].tolist() != list(signature):
                region.cleanup()
                allowed = f"needs all workers on the machine of the scheduler, and worker {rank} is on another"
                raise ConfigError("kv_tier.disk_dir", self._config.parallel.world_size, allowed)
        _unlink(region.mmap_path)
        return region

    def _open(self, num_chunks: int, rank: int | None) -> SharedOffloadRegion:
        region = SharedOffloadRegion(
            engine_id=self._config.engine_id,
            num_chunks=num_chunks,
            rank=rank,
            kv_bytes_per_chunk=self.row_bytes,
            cpu_page_size=self._share_bytes,
            creator_memory_check=_refuse_too_much,
        )
        if region.fd is not None:  # the mapping keeps one of its own
            os.close(region.fd)
            region.fd = None
        if region._creator:
            region._creator = False
            weakref.finalize(region, _unlink, region.mmap_path)  # in case that the scheduler never comes
        return region

    def _memory(self, region: SharedOffloadRegion, rank: int) -> torch.Tensor:
        return region.base_tensor.view(torch.uint8)[rank * self._share_bytes :]


def _refuse_too_much(num_bytes: int) -> None:
    shared = shutil.disk_usage(_SHARED_MEMORY).free if Path(_SHARED_MEMORY).is_dir() else num_bytes
    free = min(free_bytes(), shared)
    if num_bytes > free:
        wanted = f"with a disk tier it lies in {_SHARED_MEMORY}, where {free / 2**30:.1f} GiB are free"
        raise ConfigError("kv_tier.gib", num_bytes / 2**30, f"must be less: {wanted}")


def _signature(rank: int) -> bytearray:
    return bytearray(b"vllm-ext worker " + rank.to_bytes(4, "little"))


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
