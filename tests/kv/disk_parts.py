"""Both tiers over memory of the tests' own, for tests of what becomes of a chunk's bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import OffloadingConfig

from vllm_ext.config.kv_tier import RETENTION, KvTierConfig
from vllm_ext.kv.connector.options import TIER_KEY
from vllm_ext.kv.disk.files import DiskFiles
from vllm_ext.kv.disk.identity import MODEL_KEY, format_facts
from vllm_ext.kv.disk.manager import DiskBackedManager, HostTier
from vllm_ext.kv.disk.tier import DiskTier
from vllm_ext.kv.eviction.retention import Chain
from vllm_ext.kv.host.geometry import TierGeometry

from .tier_worker_parts import offloading_config

FILE_BYTES, PAYLOAD_BYTES = mmap.PAGESIZE, 48
CHUNK_TOKENS = 32


def key(number: int) -> OffloadKey:
    return make_offload_key(hashlib.sha256(str(number).encode()).digest(), 0)


def content(number: int) -> bytes:
    """What the chunk of this number must hold."""
    return hashlib.blake2b(str(number).encode(), digest_size=PAYLOAD_BYTES).digest()


def offloading(
    directory: Path | str, bits: int = 16, world_size: int = 1, *, disk_bytes: int = 2**20, **extra: Any
) -> OffloadingConfig:
    """What vLLM tells a spec of a tiny model."""
    tier = KvTierConfig(gib=1, bits=bits, disk_dir=str(directory), disk_gib=disk_bytes / 2**30)  # type: ignore[arg-type]
    known = {
        "cpu_bytes_to_use": 2**20,
        "eviction_policy": "retention",
        TIER_KEY: tier.model_dump(),
        MODEL_KEY: {"models": [{"name": "some/model"}]},
    }
    return offloading_config({**known, **extra}, world_size=world_size)


def chunk_files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.bin.*"))


class Memory:
    """Stands for vLLM's shared region: whole pages, as direct reads and writes need."""

    def __init__(self, num_chunks: int) -> None:
        pages = mmap.mmap(-1, num_chunks * FILE_BYTES)
        self.rows = np.frombuffer(pages, np.uint8).reshape(num_chunks, FILE_BYTES)

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self.rows)

    def cleanup(self) -> None: ...


class Rig:
    """Both tiers, and a worker that copies at once."""

    def __init__(
        self, root: Path, *, host: int = 4, files: int = 64, policy: str = RETENTION, ttl_s: float = 0.0, **changed: Any
    ) -> None:
        self.memory = Memory(host)
        self.clock = SimpleNamespace(now=0.0)
        tier: Any = HostTier(host, mmap_region=self.memory, cache_policy=policy)
        on_disk = DiskFiles(str(root), max_bytes=files * FILE_BYTES, ttl_s=ttl_s)
        config = dataclasses.replace(offloading(root), **changed)
        spec: Any = SimpleNamespace(config=config, blocks_per_chunk=1)
        facts = format_facts(config, TierGeometry.of(config, bits=16))
        self.disk = DiskTier(spec, tier.get_kv_memoryview(), on_disk, facts)
        self.manager = DiskBackedManager(tier, self.disk, clock=lambda: self.clock.now)
        self._requests = 0

    def request(self, *numbers: int) -> ReqContext:
        """A request whose prefix is these chunks, as the connector introduces it."""
        self._requests += 1
        context = ReqContext(f"r{self._requests}")
        self.manager.on_new_request(context)
        for place, number in enumerate(numbers):
            context.set_offload_key_position(key(number), (place + 1) * CHUNK_TOKENS)
        context.set_state(Chain({0: [key(number) for number in numbers]}, {0: CHUNK_TOKENS}))
        return context

    def store(self, context: ReqContext, *numbers: int, unreadable: Sequence[int] = ()) -> bool:
        """Store chunks from the device; returns false if host memory has no room."""
        output = self.manager.prepare_store([key(number) for number in numbers], context)
        if output is None:
            return False
        by_key = {key(number): number for number in numbers}
        places = output.store_spec.block_ids.tolist()  # type: ignore[attr-defined]
        for stored, place in zip(output.keys_to_store, places, strict=True):
            number = by_key[stored]
            if number in unreadable:
                self.memory.rows[place] = 0xEE
                self.manager.mark_unreadable([place])
            else:
                self.memory.rows[place, :PAYLOAD_BYTES] = np.frombuffer(content(number), np.uint8)
        if output.keys_to_store:
            self.manager.complete_store(set(output.keys_to_store), context)
        return True

    def lookup(self, context: ReqContext, *numbers: int) -> list[LookupResult]:
        """Look for a prefix as vLLM does: up to the first miss."""
        found = []
        for number in numbers:
            found.append(self.manager.lookup(key(number), context))
            if found[-1] is LookupResult.MISS:
                break
        return found

    def step(self) -> None:
        """End a step, and let the disk do what it was told."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        self.disk.drain_jobs()
        self.disk.files.sweep()

    def load(self, context: ReqContext, *numbers: int, steps: int = 20) -> list[bytes]:
        """Load the longest prefix that is found, as vLLM does; returns what was in it.

        Raises:
            AssertionError: the request still waits after so many steps.
        """
        for _ in range(steps):
            found = self.lookup(context, *numbers)
            if LookupResult.HIT_PENDING in found:
                self.step()
                continue
            hits = [number for number, result in zip(numbers, found, strict=False) if result is LookupResult.HIT]
            return self._loaded(context, hits)
        raise AssertionError(f"still waiting: {found}")

    def _loaded(self, context: ReqContext, numbers: list[int]) -> list[bytes]:
        if not numbers:
            return []
        keys = [key(number) for number in numbers]
        self.manager.touch(keys, context)
        places = self.manager.prepare_load(keys, context).block_ids.tolist()  # type: ignore[attr-defined]
        loaded = [self.memory.rows[place, :PAYLOAD_BYTES].tobytes() for place in places]
        self.manager.complete_load(keys, context)
        return loaded

    def on_disk(self, *numbers: int) -> list[bool]:
        return [self.disk.name(key(number)) in self.disk.files for number in numbers]

    def file(self, number: int) -> Path:
        path = self.disk.files.path(self.disk.name(key(number)))
        assert path is not None
        return Path(path)


def contents(*numbers: int) -> list[bytes]:
    return [content(number) for number in numbers]


@contextmanager
def rig(root: Path, **options: Any) -> Iterator[Rig]:
    """Both tiers, shut down at the end."""
    made = Rig(root, **options)
    try:
        yield made
    finally:
        made.manager.shutdown()


def fill(tiers: Rig, *numbers: int) -> None:
    """Store chunks one by one, each with time to get to disk."""
    context = tiers.request(*numbers)
    for number in numbers:
        assert tiers.store(context, number)
        tiers.step()
    tiers.step()
    tiers.manager.on_request_finished(context)


def stored(root: Path, *numbers: int, **options: Any) -> list[Path]:
    """Let a server keep chunks; returns their files."""
    with rig(root, **options) as tiers:
        fill(tiers, *numbers)
        return [tiers.file(number) for number in numbers]
