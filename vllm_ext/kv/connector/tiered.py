"""The connector that vLLM loads: its OffloadingConnector, whose copies may fail and whose chunks may be in 8 bits."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.outputs import KVConnectorOutput

from vllm_ext.config.errors import ConfigError
from vllm_ext.config.kv_tier import BETWEEN, QUANTISED
from vllm_ext.kv.connector.options import tier_of
from vllm_ext.kv.connector.prices import TransferPrices
from vllm_ext.kv.connector.scheduler import TierScheduler
from vllm_ext.kv.connector.spec import TierSpec
from vllm_ext.kv.connector.statistics import TierAccount
from vllm_ext.kv.connector.worker import LayerwiseWorker
from vllm_ext.kv.conversations.keeper import Keeper
from vllm_ext.kv.host.layout import PackedPages, UnknownLayout, layout_of
from vllm_ext.kv.host.report import LOAD, STORE, WorkerReport

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_ext.kernels.kv_quant.format import PageLayout

logger = logging.getLogger("vllm.vllm_ext.kv")


@dataclass
class TierWorkerMetadata(OffloadingWorkerMetadata):
    """What a worker reports: finished jobs, as vLLM's, and what is ours."""

    report: WorkerReport = field(default_factory=WorkerReport)

    def aggregate(self, other: Any) -> TierWorkerMetadata:
        """Return the report of several workers."""
        merged, report = super().aggregate(other), WorkerReport()
        for one in (self, other):
            if isinstance(one, TierWorkerMetadata):
                report.add(one.report)
        return TierWorkerMetadata(merged.completed_jobs, merged.transfer_stats, report)


class TieredConnector(OffloadingConnector):
    """vLLM's connector with our tier."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Take vLLM's arguments.

        Raises:
            ConfigError: the tier's options do not fit the model.
        """
        super(OffloadingConnector, self).__init__(vllm_config, role, kv_cache_config)
        config = build_offloading_config(vllm_config, kv_cache_config)
        self._canonical_layout = config.canonical_layout
        spec = TierSpec(config, kv_cache_config.num_blocks)
        self.connector_scheduler = self.connector_worker = None
        self.account: TierAccount | None = None
        """Of the scheduler's side; None in a worker."""
        if role == KVConnectorRole.SCHEDULER:
            options, books = spec.options, spec.get_manager()
            self.connector_scheduler = TierScheduler(
                spec,
                vllm_config,
                kv_cache_config,
                store=str(options.store),
                load=str(options.load),
                copies=str(options.copies),
                prices=_prices(spec),
                free_fraction=options.free_fraction,
                keeper=Keeper(
                    books,
                    ttl_s=options.ttl_s,
                    salt_share=options.salt_share,
                    returns=str(options.returns),
                    prompt_only=options.prompt_only,
                ),
            )
            store = self.connector_scheduler.store
            logger.info("KV tier: chunks are stored %s, prompts only: %s", store, options.prompt_only)
            self.account = TierAccount(self.connector_scheduler, spec.geometry, config.parallel.world_size)
        else:
            self.connector_worker = LayerwiseWorker(spec, vllm_config, kv_cache_config)
        self._report = WorkerReport()
        self._failed_requests: set[str] = set()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether layers wait for their KV, which they don't while a graph of the whole step is replayed."""
        return tier_of(extra_config).load != BETWEEN

    # --- the worker's side ------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the caches, and find out where their values lie if they are to be quantised.

        Raises:
            ConfigError: that can't be found out.
        """
        assert self.connector_worker is not None
        spec = self.connector_worker.spec
        if spec.geometry.bits == QUANTISED:
            spec.layout = self._layout(kv_caches)
        super().register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: OffloadingConnectorMetadata) -> None:
        """Begin stores, and wait for those whose blocks the step takes: what is under way first, then this step's.

        After a reset a store of this step may go to a place that an older copy still uses.
        """
        started = time.perf_counter()
        flush = kv_connector_metadata.jobs_to_flush or set()
        if older := flush - kv_connector_metadata.store_jobs.keys():
            alone = replace(kv_connector_metadata, load_jobs={}, store_jobs={}, jobs_to_flush=older)
            super().handle_preemptions(alone)
            kv_connector_metadata.jobs_to_flush = flush - older
        super().handle_preemptions(kv_connector_metadata)
        self._report.wait_s[STORE] += time.perf_counter() - started

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin loads."""
        started = time.perf_counter()
        super().start_load_kv(forward_context, **kwargs)
        self._report.wait_s[LOAD] += time.perf_counter() - started

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when a layer's KV is there, as far as it is loaded within the step."""
        assert self.connector_worker is not None
        started = time.perf_counter()
        self.connector_worker.wait_for_layer(layer_name)
        self._report.wait_s[LOAD] += time.perf_counter() - started

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return which requests' loads are through, and which of them failed."""
        assert self.connector_worker is not None
        by_blocks = len(self._kv_cache_config.kv_cache_groups) == 1
        loads = {} if by_blocks else dict(self.connector_worker._load_jobs)
        results = super().get_transfer_results(finished_req_ids)
        report = self.connector_worker.worker.take_report()
        if not by_blocks:
            report.blocks.clear()
        report.blocks |= self.connector_worker.take_doubtful()
        self._report.add(report)
        if by_blocks:
            return results
        # Block ids are not unique among groups: vLLM wants the requests then.
        self._failed_requests |= {loads[job] for job in report.load_jobs if job in loads}
        failed = self._failed_requests & results.finished_recving
        self._failed_requests -= failed
        return KVConnectorTransferResults(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=failed,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks that a load did not fill, each once."""
        blocks, self._report.blocks = self._report.blocks, set()
        return blocks

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """Return what to tell the scheduler's side."""
        meta = super().build_connector_worker_meta()
        if meta is None and not self._report.chunks:
            return None
        report, self._report = self._report, WorkerReport()
        jobs = meta or OffloadingWorkerMetadata()
        return TierWorkerMetadata(jobs.completed_jobs, jobs.transfer_stats, report)

    def _layout(self, kv_caches: dict[str, torch.Tensor]) -> PageLayout | PackedPages:
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

    @property
    def tier(self) -> TierScheduler | None:
        """The scheduler's side; None in a worker."""
        return self.connector_scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take vLLM's blocks."""
        assert self.connector_scheduler is not None
        self.connector_scheduler.bind_block_pool(gpu_block_pool)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the workers' reports."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, TierWorkerMetadata):
            side, account = self.connector_scheduler, self.account
            assert side is not None
            assert account is not None
            side.manager.mark_unreadable(meta.report.chunks)
            account.observe(meta.transfer_stats, meta.report)
            side.prices.back.observe(meta.transfer_stats.load.bytes, meta.transfer_stats.load.time)
            side.prices.out.observe(meta.transfer_stats.store.bytes, meta.transfer_stats.store.time)
        super().update_connector_output(connector_output)


def _prices(spec: TierSpec) -> TransferPrices:
    chunk_tokens = min(group.tokens_per_block for group in spec.config.groups)
    return TransferPrices(spec.geometry.chunk_bytes, chunk_tokens, takes_cycles=current_platform.is_cpu())
