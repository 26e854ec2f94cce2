"""RecordScheduler: vLLM's scheduler, whose evicted blocks and preempted requests stay on the device in 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_ext.attention.support import chosen_kernel
from vllm_ext.config.attention import STOCK
from vllm_ext.kv.device.geometry import ArenaGeometry
from vllm_ext.kv.device.manager import RecordManager, with_record_manager
from vllm_ext.kv.device.prices import RecordPrices, measured
from vllm_ext.kv.device.records import Records
from vllm_ext.kv.device.step import ATTRIBUTE
from vllm_ext.scheduling.device_place import DevicePlace
from vllm_ext.scheduling.gap_scheduler import GapScheduler

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

MEMORY, RESET, LOAD = "memory", "reset", "load"
"""Why a request is preempted: vLLM is short of blocks; its cache was reset; its KV did not come."""
_PROMOTED_ABOVE = 0.25
"""Share of the blocks that stay free where records are moved into blocks."""


class RecordScheduler(GapScheduler):
    """vLLM's scheduler with records of 8 bits beside its blocks, where the device's memory was divided so.

    Attributes:
        records: None: there is no arena.
        place: Likewise.
    """

    records: Records | None = None
    place: DevicePlace | None
    _preempt_reason: str = MEMORY

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        """Take vLLM's arguments."""
        self.place = None
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        geometry = ArenaGeometry.of(kv_cache_config)
        if geometry is None:
            return
        (manager,) = self.kv_cache_manager.coordinator.single_type_managers
        assert isinstance(manager, RecordManager)
        self._manager = manager
        self.records = manager.records = Records(self.kv_cache_manager.block_pool, geometry)
        self.records.spare_blocks = self._spare_blocks
        self._geometry, spec = geometry, kv_cache_config.kv_cache_groups[0].kv_cache_spec
        on_cpu, unpacks = current_platform.is_cpu(), self._unpacks
        self.price_records(measured(geometry, spec.block_size, spec.dtype, on_cpu=on_cpu, unpacks=unpacks))

    @property
    def _unpacks(self) -> bool:
        return chosen_kernel(self.vllm_config) == STOCK

    def price_records(self, prices: RecordPrices | float) -> None:
        """Say what records cost, where moving them takes no time, or another time than here.

        Args:
            prices: Or the bytes per second that the device's memory moves.
        """
        assert self.records is not None
        if not isinstance(prices, RecordPrices):
            prices = RecordPrices.by_bandwidth(self._geometry, self.block_size, prices, unpacks=self._unpacks)
        self.place = DevicePlace(self.records, prices)
        if self.gaps is not None:
            self.gaps.int8_s_per_block = prices.stay_s(self.block_size, 1)

    def device_state(self) -> dict[str, Any]:
        """Return what became of KV on the device, fit for JSON; nothing of what is not done here."""
        gaps = {} if self.gaps is None else {"kv_gaps": self.gaps.counts.state()}
        return gaps if self.records is None else {**gaps, "kv_device": self.records.state()}

    def _managed(self, kv_cache_config: KVCacheConfig, *, with_gaps: bool) -> KVCacheConfig:
        if ArenaGeometry.of(kv_cache_config) is not None:
            return with_record_manager(kv_cache_config)
        return super()._managed(kv_cache_config, with_gaps=with_gaps)

    def _spare_blocks(self) -> int:
        """Return the free blocks that neither who runs, nor who is admitted next, is expected to need soon."""
        manager = self.kv_cache_manager
        pool = manager.block_pool
        kept = max(manager.watermark_blocks, int(_PROMOTED_ABOVE * pool.num_gpu_blocks))
        wanted = self._inflight_prefill_reserved_blocks() + len(self.running)
        spare: int = pool.get_num_free_blocks() - kept - wanted
        return spare

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """As vLLM's; says which records move, and which are read."""
        output = super().schedule(throttle_prefills)
        if self.records is not None:
            step = self.records.step(self._manager.reads(output.num_scheduled_tokens), output)
            if step is not None:
                setattr(output, ATTRIBUTE, step)
        return output

    def _get_local_prefix_cache_hit(self, request: Request, *limit: int | None) -> tuple[KVCacheBlocks, int, int, bool]:
        blocks, num_tokens, boundary, diverged = super()._get_local_prefix_cache_hit(request, *limit)
        if self.records is not None and num_tokens == sum(map(len, blocks.blocks)) * self.block_size:
            partial = self.records.partial_hit(request, num_tokens, self.block_size)
            if partial is not None:
                blocks = blocks + KVCacheBlocks(([partial[0]],))
                num_tokens += partial[1]
        return blocks, num_tokens, boundary, diverged

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if self.records is not None and self._preempt_reason not in (RESET, LOAD):
            computed, table = request.num_computed_tokens, self._manager.req_to_blocks.get(request.request_id, [])
            self.records.await_blocks(request.request_id, table)
            if self.gaps is None or not self.gaps.is_within(request.request_id, computed):
                # Of what is under way, only tokens that are known already: others may be sampled again, and differ.
                known = min(computed, request.num_tokens)
                self.records.keep_partial(request.request_id, table, known, self.block_size)
        super()._preempt_request(request, *args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Reset vLLM's prefix cache, and forget what was kept for preempted requests, also where vLLM's reset fails."""
        try:
            return bool(super().reset_prefix_cache(*args, **kwargs))
        finally:
            if self.records is not None:
                self.records.forget_all()

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self.records is not None:
            self.records.forget(request.request_id)
        return super()._free_request(request, *args, **kwargs)
