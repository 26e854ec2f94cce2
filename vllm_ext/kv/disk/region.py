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

_SIGNATURE = b"vllm-ext worker "
_SHARED_MEMORY = "/dev/shm"


def row_bytes(geometry: TierGeometry, world_size: int) -> int:
    """Return the bytes of a chunk of all workers: whole pages, and whole records where there are any."""
    unit = math.lcm(mmap.PAGESIZE, geometry.record_bytes or 1)
    return -(-geometry.chunk_bytes * world_size // unit) * unit


def worker_region(config: OffloadingConfig, geometry: TierGeometry, num_chunks: int) -> SharedOffloadRegion:
    """Open the memory in a worker, and sign its share.

    Raises:
        ConfigError: there is not enough memory.
    """
    region = _open(config, geometry, num_chunks, config.parallel.rank)
    share = worker_share(region, config, geometry)
    signature = _signature(config.parallel.rank)
    share[: len(signature)] = torch.frombuffer(signature, dtype=torch.uint8)
    return region


def worker_share(region: SharedOffloadRegion, config: OffloadingConfig, geometry: TierGeometry) -> torch.Tensor:
    """Return a worker's memory, shape [bytes], uint8: its share of chunk c begins at ``c * row_bytes``."""
    return region.base_tensor.view(torch.uint8)[config.parallel.rank * geometry.chunk_bytes :]


def scheduler_region(config: OffloadingConfig, geometry: TierGeometry, num_chunks: int) -> SharedOffloadRegion:
    """Open the memory in the scheduler's process, after all workers did.

    Raises:
        ConfigError: a worker does not share it.
    """
    region = _open(config, geometry, num_chunks, None)
    memory = region.base_tensor.view(torch.uint8)
    for rank in range(config.parallel.world_size):
        signature, at = _signature(rank), rank * geometry.chunk_bytes
        if bytes(memory[at : at + len(signature)].tolist()) != bytes(signature):
            region.cleanup()
            allowed = f"needs all workers on the machine of the scheduler, and worker {rank} is on another"
            raise ConfigError("kv_tier.disk_dir", config.parallel.world_size, allowed)
    _unlink(region.mmap_path)
    return region


def _open(config: OffloadingConfig, geometry: TierGeometry, num_chunks: int, rank: int | None) -> SharedOffloadRegion:
    region = SharedOffloadRegion(
        engine_id=config.engine_id,
        num_chunks=num_chunks,
        rank=rank,
        kv_bytes_per_chunk=row_bytes(geometry, config.parallel.world_size),
        cpu_page_size=geometry.chunk_bytes,
        creator_memory_check=_refuse_too_much,
    )
    if region.fd is not None:  # the mapping keeps one of its own
        os.close(region.fd)
        region.fd = None
    if region._creator:
        region._creator = False
        weakref.finalize(region, _unlink, region.mmap_path)  # in case that the scheduler never comes
    return region


def _refuse_too_much(num_bytes: int) -> None:
    shared = shutil.disk_usage(_SHARED_MEMORY).free if Path(_SHARED_MEMORY).is_dir() else num_bytes
    free = min(free_bytes(), shared)
    if num_bytes > free:
        wanted = f"with a disk tier it lies in {_SHARED_MEMORY}, where {free / 2**30:.1f} GiB are free"
        raise ConfigError("kv_tier.gib", num_bytes / 2**30, f"must be less: {wanted}")


def _signature(rank: int) -> bytearray:
    return bytearray(_SIGNATURE + rank.to_bytes(4, "little"))


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
