"""The connector that vLLM loads: its OffloadingConnector, whose copies may fail and whose chunks may be in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.outputs import KVConnectorOutput

from vllm_ext.config_checks import ConfigError
from vllm_ext.config_kv import QUANTISED, KvTierConfig
from vllm_ext.kv.layout import UnknownLayout, layout_of
from vllm_ext.kv.options import BITS_KEY, CHUNK_KEY, LATE_KEY
from vllm_ext.kv.scheduler_side import TierScheduler
from vllm_ext.kv.spec import TierSpec
from vllm_ext.kv.worker import TierWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_ext.kernels.kv_quant.format import PageLayout


@dataclass
class TierWorkerMetadata(OffloadingWorkerMetadata):
    """What a worker reports: finished jobs, as vLLM's, and chunks that hold nothing readable."""

    unreadable: set[int] = field(default_factory=set)

    def aggregate(self, other: Any) -> TierWorkerMetadata:
        """Return the report of several workers."""
        merged = super().aggregate(other)
        unreadable = self.unreadable | getattr(other, "unreadable", set())
        return TierWorkerMetadata(merged.completed_jobs, merged.transfer_stats, unreadable)


class TieredConnector(OffloadingConnector):
    """vLLM's connector with our tier."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Take vLLM's arguments.

        Raises:
            ConfigError: the tier's options do not fit the model.
        """
        _set_blocks_per_chunk(vllm_config, kv_cache_config)
        super(OffloadingConnector, self).__init__(vllm_config, role, kv_cache_config)
        config = build_offloading_config(vllm_config, kv_cache_config)
        self._canonical_layout = config.canonical_layout
        spec = TierSpec(config)
        self.connector_scheduler = self.connector_worker = None
        if role == KVConnectorRole.SCHEDULER:
            late = bool(config.extra_config[LATE_KEY])
            self.connector_scheduler = TierScheduler(spec, vllm_config, kv_cache_config, late=late)
        else:
            self.connector_worker = OffloadingConnectorWorker(spec, vllm_config, kv_cache_config)
        self._unreadable: set[int] = set()
        self._unfilled_blocks: set[int] = set()
        self._failed_requests: set[str] = set()

    # --- the worker's side ------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the caches, and find out where their values lie if they are to be quantised.

        Raises:
            ConfigError: that can't be found out.
        """
        spec = self.connector_worker.spec
        if spec.geometry.bits == QUANTISED:
            spec.layout = self._layout(kv_caches)
        super().register_kv_caches(kv_caches)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return which requests' loads are through, and which of them failed."""
        by_blocks = len(self._kv_cache_config.kv_cache_groups) == 1
        loads = {} if by_blocks else dict(self.connector_worker._load_jobs)
        results = super().get_transfer_results(finished_req_ids)
        worker = self.connector_worker.worker
        if not isinstance(worker, TierWorker):
            return results
        failures = worker.take_failures()
        self._unreadable |= failures.chunks
        if by_blocks:
            self._unfilled_blocks |= failures.blocks
            return results
        # Block ids are not unique among groups: vLLM wants the requests then.
        self._failed_requests |= {loads[job] for job in failures.load_jobs if job in loads}
        failed = self._failed_requests & results.finished_recving
        self._failed_requests -= failed
        return KVConnectorTransferResults(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=failed,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks that a load did not fill, each once."""
        blocks, self._unfilled_blocks = self._unfilled_blocks, set()
        return blocks

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """Return what to tell the scheduler's side."""
        meta = super().build_connector_worker_meta()
        if meta is None and not self._unreadable:
            return None
        unreadable, self._unreadable = self._unreadable, set()
        if meta is None:
            return TierWorkerMetadata(unreadable=unreadable)
        return TierWorkerMetadata(meta.completed_jobs, meta.transfer_stats, unreadable)

    def _layout(self, kv_caches: dict[str, torch.Tensor]) -> PageLayout:
        layers = self._vllm_config.compilation_config.static_forward_context
        num_blocks = self._kv_cache_config.num_blocks
        if any(cache.shape[0] != num_blocks for cache in kv_caches.values()):
            allowed = "needs attention kernels that work on vLLM's own blocks, not on parts of them; use 16"
            raise ConfigError("kv_tier.bits", QUANTISED, allowed)
        try:
            found = {name: layout_of(layers[name], cache) for name, cache in kv_caches.items()}
        except (UnknownLayout, KeyError) as error:
            raise ConfigError("kv_tier.bits", QUANTISED, f"{error}; use 16") from error
        layouts = set(found.values())
        if len(layouts) > 1:
            allowed = f"needs layers that are laid out alike, and these are not: {sorted(found)}; use 16"
            raise ConfigError("kv_tier.bits", QUANTISED, allowed)
        return layouts.pop()

    # --- the scheduler's side ---------------------------------------------------------------------------------------

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the workers' reports."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, TierWorkerMetadata) and meta.unreadable:
            self.connector_scheduler.manager.mark_unreadable(meta.unreadable)
        super().update_connector_output(connector_output)


def _set_blocks_per_chunk(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Say in vLLM's terms how large a chunk is, now that the size of a block is known."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    if "blocks_per_chunk" in extra:
        return
    sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
    tier = KvTierConfig(bits=extra[BITS_KEY], chunk_tokens=extra[CHUNK_KEY])
    extra["blocks_per_chunk"] = min(tier.blocks_per_chunk(size) for size in sizes)
