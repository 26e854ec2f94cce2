"""How large the tier is, and who keeps its books and copies: what vLLM's connector asks an OffloadingSpec."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingMetricMetadata, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu import common
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from vllm_ext.config.errors import ConfigError
from vllm_ext.config.kv_tier import AUTO, QUANTISED
from vllm_ext.kv.connector.options import tier_of
from vllm_ext.kv.host.codec import Codec, QuantisedCodec, RawCodec
from vllm_ext.kv.host.geometry import TierGeometry
from vllm_ext.kv.host.manager import TierManager
from vllm_ext.kv.host.memory import free_bytes
from vllm_ext.kv.host.worker import TierWorker

if TYPE_CHECKING:
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    from vllm_ext.kernels.kv_quant.format import PageLayout
    from vllm_ext.kv.disk.manager import DiskBackedManager
    from vllm_ext.kv.host.layout import PackedPages

logger = init_logger("vllm.vllm_ext.kv")

_DEVICE_MULTIPLE = 2
"""So many times the device's KV where nobody said how much host memory the tier may take."""


class TierSpec(CPUOffloadingSpec):
    """Our tier.

    Attributes:
        options: The tier's, with nothing left open.
        layout: Of a page, set by the connector before the worker is asked for; needed with 8 bits only.
    """

    layout: PageLayout | PackedPages | None = None
    _manager: TierManager | DiskBackedManager | None
    _worker: OffloadingWorker | None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Return the metrics of the tiers that there are."""
        if not tier_of(extra_config).disk_dir:
            plain: dict[str, OffloadingMetricMetadata] = super().build_metric_definitions(extra_config)
            return plain
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        from vllm_ext.kv.disk.tier import DiskTier

        ours = DiskTier.build_metric_definitions(extra_config)
        return {**TieringOffloadingSpec.build_metric_definitions(extra_config), **ours}

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """Return the labels of ``vllm:kv_offload_config_info``, which vLLM publishes from 0.33 on."""
        if not tier_of(extra_config).disk_dir:
            return tuple(super().config_info_keys(extra_config))
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        return tuple(TieringOffloadingSpec.config_info_keys(extra_config))

    def __init__(self, config: OffloadingConfig, device_blocks: int | None = None) -> None:
        """Take vLLM's configuration, and how many blocks of KV the device has, of which ``gib: auto`` is twice as many.

        Raises:
            ConfigError: the tier holds no chunk, or this model's KV can't be quantised.
        """
        super().__init__(config)
        self.replicated_layout = False  # each worker keeps its own share
        self.options = tier_of(self.extra_config)
        assert self.options.bits is not None
        self.geometry = TierGeometry.of(config, self.options.bits)
        self._region: SharedOffloadRegion | None = None
        host_bytes = int(self.extra_config["cpu_bytes_to_use"])
        per_chunk = self._chunk_bytes_of_all
        if self.options.disk_dir:
            from vllm_ext.kv.disk.region import row_bytes

            per_chunk = row_bytes(self.geometry, config.parallel.world_size)
        self.num_chunks = host_bytes // per_chunk
        if self.options.gib == AUTO and device_blocks is not None:
            self.num_chunks = min(self.num_chunks, _DEVICE_MULTIPLE * device_blocks)
        if not self.num_chunks:
            least = per_chunk / 2**30
            raise ConfigError("kv_tier.gib", host_bytes / 2**30, f"must be at least {least:.3g}, to hold one chunk")

    @property
    def _chunk_bytes_of_all(self) -> int:
        """Bytes of a chunk in all workers together, without what fills a row up to whole pages."""
        return self.geometry.chunk_bytes * int(self.config.parallel.world_size)

    def get_manager(self) -> TierManager | DiskBackedManager:
        """Return the scheduler's side.

        Raises:
            ConfigError: the disk can't be used.
        """
        if self._manager is None:
            options = {
                "cache_policy": self.eviction_policy,
                "enable_events": self.kv_events_config.enable_kv_cache_events,
                **self._info(),
            }
            self._manager = (
                self._with_disk(options) if self.options.disk_dir else TierManager(self.num_chunks, **options)
            )
        return self._manager

    def _info(self) -> dict[str, Any]:
        """Return what vLLM's manager publishes of host memory, as an option of it; nothing before vLLM 0.33."""
        kind = getattr(common, "CPUOffloadingInfo", None)
        if kind is None:
            return {}
        return {"info": kind.from_config(self.config, self.num_chunks, self._chunk_bytes_of_all)}

    def _with_disk(self, options: dict[str, Any]) -> DiskBackedManager:
        """Return the books of both tiers, over the memory that the workers share."""
        from vllm_ext.kv.disk.files import DiskFiles
        from vllm_ext.kv.disk.identity import format_facts
        from vllm_ext.kv.disk.manager import DiskBackedManager, HostTier
        from vllm_ext.kv.disk.region import row_bytes, scheduler_region
        from vllm_ext.kv.disk.tier import DiskTier

        parallel, max_bytes = self.config.parallel, self.options.disk_bytes
        if max_bytes < (least := row_bytes(self.geometry, parallel.world_size)):
            allowed = f"must be at least {least / 2**30:.3g} for each replica, to hold one chunk"
            raise ConfigError("kv_tier.disk_gib", max_bytes / 2**30, allowed)
        root = os.path.join(self.options.disk_dir, f"vllm-ext-kv-{parallel.data_parallel_index}")
        files = DiskFiles(root, max_bytes=max_bytes, ttl_s=self.options.ttl_s)
        try:
            region = scheduler_region(self.config, self.geometry, self.num_chunks)
            host = HostTier(self.num_chunks, mmap_region=region, **options)
            disk = DiskTier(self, host.get_kv_memoryview(), files, format_facts(self.config, self.geometry))
        except BaseException:
            files.close()
            raise
        logger.info("KV tier: at most %.2f GiB on disk, in %s", max_bytes / 2**30, root)
        return DiskBackedManager(host, disk)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker's side, with its memory.

        Raises:
            ConfigError: there is not enough memory.
            NotImplementedError: KV is neither in the CPU's memory nor in a CUDA device's.
            RuntimeError: the connector found out too little.
        """
        if self._worker is None:
            tensors = [cache.tensor for cache in kv_caches.tensors]
            groups = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]
            kinds = {tensor.device.type for tensor in tensors}
            if kinds == {"cuda"}:
                self._worker = self._cuda_worker(tensors, groups)
            elif kinds == {"cpu"}:
                self._worker = TierWorker(
                    self._codec(tensors, self._allocate()),
                    groups,
                    chunk_bytes=self.geometry.chunk_bytes,
                )
            else:
                raise NotImplementedError(f"the KV tier copies KV of the CPU or of CUDA, not of {sorted(kinds)}")
        return self._worker

    def _cuda_worker(self, tensors: list[torch.Tensor], groups: list[list[int]]) -> OffloadingWorker:
        from vllm_ext.kv.cuda.worker import cuda_worker
        from vllm_ext.kv.host.layout import PackedPages

        if isinstance(self.layout, PackedPages):
            raise ConfigError("kv_tier.bits", QUANTISED, "needs pages that strides describe on CUDA; use 16")
        stride = self._strides(tensors).chunk_bytes
        rows = self._allocate().as_strided((self.num_chunks, self.geometry.chunk_bytes), (stride, 1))
        return cuda_worker(tensors, groups, rows, self.geometry, self.layout)

    def _codec(self, tensors: list[torch.Tensor], pool: torch.Tensor) -> Codec:
        strides = self._strides(tensors)
        if self.geometry.bits != QUANTISED:
            return RawCodec(tensors, pool, strides)
        if self.layout is None:
            raise RuntimeError("the layout of pages was not found out before the worker was built")
        return QuantisedCodec(tensors, pool, strides, self.layout)

    def _strides(self, tensors: list[torch.Tensor]) -> TierGeometry:
        """Return the geometry by which chunks follow each other in the pool: with a disk, all workers' shares of one.

        Raises:
            ValueError: this worker's KV takes more than its share.
        """
        if not self.options.disk_dir:
            return self.geometry
        from vllm_ext.kv.disk.region import row_bytes

        share = sum(tensor.shape[1] * tensor.element_size() for tensor in tensors)
        if self.geometry.bits != QUANTISED and share > self.geometry.chunk_bytes:
            raise ValueError(f"chunk_bytes={self.geometry.chunk_bytes}: this worker's blocks take {share}")
        return dataclasses.replace(self.geometry, chunk_bytes=row_bytes(self.geometry, self.config.parallel.world_size))

    def _allocate(self) -> torch.Tensor:
        wanted = self.num_chunks * self.geometry.chunk_bytes
        if self.options.disk_dir:
            from vllm_ext.kv.disk.region import worker_region, worker_share

            self._region = worker_region(self.config, self.geometry, self.num_chunks)
            pool = worker_share(self._region, self.config, self.geometry)
        else:
            free = free_bytes()
            if wanted > free:
                share, left = f"{wanted / 2**30:.1f} GiB", f"{free / 2**30:.1f} GiB"
                allowed = f"must be less: a worker's share is {share}, and {left} are free"
                raise ConfigError("kv_tier.gib", int(self.extra_config["cpu_bytes_to_use"]) / 2**30, allowed)
            pool = torch.empty(wanted, dtype=torch.uint8)
        logger.info(
            "KV tier: %d blocks, %.2f GiB in this worker, %d bits%s",
            self.num_chunks, wanted / 2**30, self.geometry.bits,
            "; --kv-tier-gib takes more, less, or with 0 none" if self.options.gib == AUTO else "",
        )  # fmt: skip
        return pool
