"""Workers and scheduler over the same memory: each worker's share of a chunk goes to disk and comes back to it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu import common

from tests.support.upstream import needs
from vllm_ext.config.errors import ConfigError
from vllm_ext.kv.connector.spec import TierSpec
from vllm_ext.kv.disk.identity import MODEL_KEY
from vllm_ext.kv.disk.region import SharedRows

from .disk_parts import key, offloading
from .tier_worker_parts import LAYOUT, random_kv

pytestmark = needs("kv-disk")

NUM_TENSORS, NUM_BLOCKS = 2, 12
CHUNKS = [key(1), key(2), key(3)]
BLOCKS = [4, 9, 0]


class Engine:
    """The parts of an engine's tier, in one process: workers first, as vLLM builds them."""

    def __init__(
        self, directory: Path | str, bits: int, world_size: int, *, missing: int | None = None, **extra: Any
    ) -> None:
        self.config = offloading(directory, bits, world_size, **extra)
        self.specs = [TierSpec(ranked(self.config, rank)) for rank in range(world_size)]
        self.kv = [random_kv(NUM_TENSORS, NUM_BLOCKS, seed=rank) for rank in range(world_size)]
        self.workers = []
        for rank, spec in enumerate(self.specs):
            if rank != missing:
                spec.layout = LAYOUT
                self.workers.append(spec.get_worker(caches(self.kv[rank])))
        self.scheduler = TierSpec(self.config)
        self.manager: Any = self.scheduler.get_manager()
        self.context = ReqContext("r")
        self.manager.on_new_request(self.context)

    def store(self) -> None:
        output = self.manager.prepare_store(CHUNKS, self.context)
        for worker in self.workers:
            worker.submit_store(1, device_blocks(), output.store_spec)
            worker.wait({1})
        self.manager.complete_store(CHUNKS, self.context)

    def load(self) -> None:
        places = self.manager.prepare_load(CHUNKS, self.context)
        for worker in self.workers:
            worker.submit_load(2, places, device_blocks())
            worker.wait({2})
        self.manager.complete_load(CHUNKS, self.context)

    def promote(self) -> list[LookupResult]:
        found = [self.manager.lookup(chunk, self.context) for chunk in CHUNKS]
        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        self.manager.disk.drain_jobs()
        return found

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.manager.shutdown()


def device_blocks() -> GPULoadStoreSpec:
    return GPULoadStoreSpec(BLOCKS, group_sizes=[len(BLOCKS)], block_indices=[0])


def ranked(config: OffloadingConfig, rank: int) -> OffloadingConfig:
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, rank=rank))


def caches(tensors: list[torch.Tensor]) -> CanonicalKVCaches:
    pages = [CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in tensors]
    refs = [CanonicalKVCacheRef(index, tensor.shape[1]) for index, tensor in enumerate(tensors)]
    return CanonicalKVCaches(pages, [refs])


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("bits", [16, 8])
def test_every_worker_gets_its_share_back_after_a_restart(tmp_path: Path, bits: int, world_size: int) -> None:
    first = Engine(tmp_path, bits, world_size)
    first.store()
    stored = [[tensor.clone() for tensor in tensors] for tensors in first.kv]
    first.load()
    expected = [[tensor.clone() for tensor in tensors] for tensors in first.kv]
    first.close()
    second = Engine(tmp_path, bits, world_size)
    for tensors in second.kv:
        for tensor in tensors:
            tensor.zero_()
    assert second.promote() == [LookupResult.HIT_PENDING] * 3
    assert second.promote() == [LookupResult.HIT] * 3
    second.load()
    for rank in range(world_size):
        for tensor in range(NUM_TENSORS):
            found = second.kv[rank][tensor][BLOCKS]
            assert torch.equal(found, expected[rank][tensor][BLOCKS]), "as from host memory"
            if bits == 16:
                assert torch.equal(found, stored[rank][tensor][BLOCKS])
    second.close()


def test_another_number_of_workers_or_another_model_finds_nothing(tmp_path: Path) -> None:
    first = Engine(tmp_path, 16, 2)
    first.store()
    first.close()
    other_model = {MODEL_KEY: {"models": [{"name": "other/model"}]}}
    for bits, world_size, extra in [(16, 1, {}), (8, 2, {}), (16, 2, other_model)]:
        other = Engine(tmp_path, bits, world_size, **extra)
        assert other.promote() == [LookupResult.MISS] * 3
        other.close()


def test_a_worker_on_another_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="worker 1 is on another"):
        Engine(tmp_path, 16, 2, missing=1)
    Engine(tmp_path, 16, 2).close()


def test_a_disk_that_holds_no_chunk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_tier.disk_gib=.*to hold one chunk"):
        Engine(tmp_path, 16, 1, disk_bytes=100)


def test_host_memory_that_holds_no_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_tier.gib=.*to hold one chunk"):
        Engine(tmp_path, 16, 1, cpu_bytes_to_use=4000)


def test_the_memory_has_no_name_once_all_have_it(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 16, 1)
    assert not os.path.exists(f"/dev/shm/vllm_offload_{engine.config.engine_id}.mmap")
    engine.close()
    lonely = offloading(tmp_path, 16, 1)
    spec = TierSpec(lonely)
    spec.get_worker(caches(random_kv()))
    path = f"/dev/shm/vllm_offload_{lonely.engine_id}.mmap"
    assert os.path.exists(path), "a scheduler may still come"
    spec._worker.shutdown()  # type: ignore[union-attr]
    del spec
    assert not os.path.exists(path)


@pytest.mark.parametrize("bits", [16, 8])
def test_rows_are_whole_pages_and_whole_records(tmp_path: Path, bits: int) -> None:
    config = offloading(tmp_path, bits, 3)
    geometry = TierSpec(config).geometry
    row = SharedRows(config, geometry).row_bytes
    assert row % 4096 == 0
    assert row >= 3 * geometry.chunk_bytes
    assert not geometry.record_bytes or row % geometry.record_bytes == 0


@pytest.mark.skipif(not hasattr(common, "CPUOffloadingInfo"), reason="vLLM publishes such facts from 0.33 on")
@pytest.mark.parametrize("disk", [True, False])
def test_facts_that_are_published_have_the_labels_that_were_promised(tmp_path: Path, disk: bool) -> None:
    engine = Engine(tmp_path, 16, 1) if disk else Engine("", 16, 1, disk_bytes=0)
    spec, facts = engine.scheduler, engine.manager.config_info()
    promised = TierSpec.config_info_keys(engine.config.extra_config)
    assert {label for series in facts for label in series} == set(promised)
    assert facts[0]["cpu_num_chunks"] == spec.num_chunks
    assert facts[0]["cpu_kv_cache_size_bytes"] == spec.num_chunks * spec.geometry.chunk_bytes
    engine.close()
