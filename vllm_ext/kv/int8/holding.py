"""What a scheduler does so that evicted blocks and preempted requests stay on the device in 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_ext.attention.support import chosen_kernel
from vllm_ext.config.attention import STOCK
from vllm_ext.kv.int8.geometry import ArenaGeometry
from vllm_ext.kv.int8.manager import RecordManager
from vllm_ext.kv.int8.place import DevicePlace
from vllm_ext.kv.int8.prices import RecordPrices, measured
from vllm_ext.kv.int8.records import Records
from vllm_ext.kv.int8.step import ATTRIBUTE

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_ext.kv.partial_prefix.search import GapSearch

_PROMOTED_ABOVE = 0.25
"""Share of the blocks that stay free where records are moved into blocks."""


class RecordHolding:
    """One scheduler's dealings with records of 8 bits beside its blocks, where the device's memory was divided so.

    Attributes:
        records: The records.
        place: What it costs to stay there.
    """

    def __init__(self, engine: Scheduler, geometry: ArenaGeometry, gaps: GapSearch | None) -> None:
        """Take vLLM's scheduler, with the block manager of `with_record_manager`.

        Args:
            engine: The scheduler.
            geometry: How the device's memory is divided.
            gaps: Finds what is kept behind gaps; None where lookups end at the first.
        """
        (manager,) = engine.kv_cache_manager.coordinator.single_type_managers
        assert isinstance(manager, RecordManager)
        self._engine, self._manager, self._geometry, self._gaps = engine, manager, geometry, gaps
        self.records = manager.records = Records(engine.kv_cache_manager.block_pool, geometry)
        self.records.spare_blocks = self._spare_blocks
        spec = engine.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self._unpacks = chosen_kernel(engine.vllm_config) == STOCK
        on_cpu = current_platform.is_cpu()
        self.place = DevicePlace(
            self.records, measured(geometry, spec.block_size, spec.dtype, on_cpu=on_cpu, unpacks=self._unpacks)
        )

    def price(self, bytes_per_s: float) -> None:
        """Say how many bytes per second the device's memory moves, where that can't be measured here."""
        size = self._engine.block_size
        self.place.prices = RecordPrices.by_bandwidth(self._geometry, size, bytes_per_s, unpacks=self._unpacks)

    def _spare_blocks(self) -> int:
        """Return the free blocks that neither who runs, nor who is admitted next, is expected to need soon."""
        engine = self._engine
        manager, pool = engine.kv_cache_manager, engine.kv_cache_manager.block_pool
        kept = max(manager.watermark_blocks, int(_PROMOTED_ABOVE * pool.num_gpu_blocks))
        wanted = engine._inflight_prefill_reserved_blocks() + len(engine.running)
        spare: int = pool.get_num_free_blocks() - kept - wanted
        return spare

    def step(self, output: SchedulerOutput) -> None:
        """Say which records move in a scheduled step, and which are read."""
        step = self.records.step(self._manager.reads(output.num_scheduled_tokens), output)
        if step is not None:
            setattr(output, ATTRIBUTE, step)

    def hit(self, request: Request, blocks: KVCacheBlocks, num_tokens: int) -> tuple[KVCacheBlocks, int]:
        """Return a prefix hit and its tokens, with a preempted request's last block behind it where that is kept."""
        size: int = self._engine.block_size
        if num_tokens == sum(map(len, blocks.blocks)) * size:
            partial = self.records.partial_hit(request, num_tokens, size)
            if partial is not None:
                return blocks + KVCacheBlocks(([partial[0]],)), num_tokens + partial[1]
        return blocks, num_tokens

    def leaves(self, request: Request) -> None:
        """Keep what a running request holds, which is preempted now."""
        req_id, computed = request.request_id, request.num_computed_tokens
        table = self._manager.req_to_blocks.get(req_id, [])
        self.records.await_blocks(req_id, table)
        if self._gaps is None or not self._gaps.is_within(req_id, computed):
            # Of what is under way, only tokens that are known already: others may be sampled again, and differ.
            self.records.keep_partial(req_id, table, min(computed, request.num_tokens), self._engine.block_size)
