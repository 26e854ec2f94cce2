"""How large the tier is, and who keeps its books and copies: what vLLM's connector asks an OffloadingSpec."""

from __future__ import annotations

from collections.abc import Mapping
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
from vllm_ext.kv.host.codec import QuantisedCodec, RawCodec
from vllm_ext.kv.host.geometry import TierGeometry
from vllm_ext.kv.host.layout import PackedPages
from vllm_ext.kv.host.manager import TierManager
from vllm_ext.kv.host.memory import free_bytes
from vllm_ext.kv.host.worker import TierWorker

if TYPE_CHECKING:
    from vllm_ext.kernels.kv_quant.format import PageLayout
    from vllm_ext.kv.disk.manager import DiskBackedManager
    from vllm_ext.kv.disk.region import SharedRows

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
        found = dict(_upstream(extra_config).build_metric_definitions(extra_config))
        if tier_of(extra_config).disk_dir:
            from vllm_ext.kv.disk.tier import DiskTier

            found.update(DiskTier.build_metric_definitions(extra_config))
        return found

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """Return the labels of ``vllm:kv_offload_config_info``, which vLLM publishes from 0.33 on."""
        return tuple(_upstream(extra_config).config_info_keys(extra_config))

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
        self._shared: SharedRows | None = None
        self._chunk_bytes = self.geometry.chunk_bytes * int(config.parallel.world_size)
        """Of all workers together, without what fills a row up to whole pages."""
        if self.options.disk_dir:
            from vllm_ext.kv.disk.region import SharedRows

            self._shared = SharedRows(config, self.geometry)
        per_chunk = self._chunk_bytes if self._shared is None else self._shared.row_bytes
        self._host_gib = int(self.extra_config["cpu_bytes_to_use"]) / 2**30
        self.num_chunks = int(self.extra_config["cpu_bytes_to_use"]) // per_chunk
        if self.options.gib == AUTO and device_blocks is not None:
            self.num_chunks = min(self.num_chunks, _DEVICE_MULTIPLE * device_blocks)
        if not self.num_chunks:
            allowed = f"must be at least {per_chunk / 2**30:.3g}, to hold one chunk"
            raise ConfigError("kv_tier.gib", self._host_gib, allowed)

    def get_manager(self) -> TierManager | DiskBackedManager:
        """Return the scheduler's side.

        Raises:
            ConfigError: the disk can't be used.
        """
        if self._manager is None:
            options: dict[str, Any] = {
                "cache_policy": self.eviction_policy,
                "enable_events": self.kv_events_config.enable_kv_cache_events,
            }
            if (published := getattr(common, "CPUOffloadingInfo", None)) is not None:  # from vLLM 0.33 on
                options["info"] = published.from_config(self.config, self.num_chunks, self._chunk_bytes)
            if self._shared is None:
                self._manager = TierManager(self.num_chunks, **options)
            else:
                from vllm_ext.kv.disk.manager import open_disk

                self._manager = open_disk(self, self.geometry, self._shared, self.options, **options)
        return self._manager

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
            if kinds not in ({"cuda"}, {"cpu"}):
                raise NotImplementedError(f"the KV tier copies KV of the CPU or of CUDA, not of {sorted(kinds)}")
            self._worker = (self._cuda_worker if kinds == {"cuda"} else self._cpu_worker)(tensors, groups)
        return self._worker

    def _cpu_worker(self, tensors: list[torch.Tensor], groups: list[list[int]]) -> OffloadingWorker:
        pool, size = self._pool(), self.geometry
        codec: RawCodec | QuantisedCodec
        if size.bits != QUANTISED:
            codec = RawCodec(tensors, pool, size, row_bytes=self._row_bytes)
        elif self.layout is None:
            raise RuntimeError("the layout of pages was not found out before the worker was built")
        else:
            codec = QuantisedCodec(tensors, pool, size, self.layout, row_bytes=self._row_bytes)
        return TierWorker(codec, groups, chunk_bytes=size.chunk_bytes)

    def _cuda_worker(self, tensors: list[torch.Tensor], groups: list[list[int]]) -> OffloadingWorker:
        from vllm_ext.kv.cuda.worker import cuda_worker

        if isinstance(self.layout, PackedPages):
            raise ConfigError("kv_tier.bits", QUANTISED, "needs pages that strides describe on CUDA; use 16")
        rows = self._pool().as_strided((self.num_chunks, self.geometry.chunk_bytes), (self._row_bytes, 1))
        return cuda_worker(tensors, groups, rows, self.geometry, self.layout)

    @property
    def _row_bytes(self) -> int:
        """From a chunk to the next in the pool: with a disk, all workers' shares of one."""
        return self.geometry.chunk_bytes if self._shared is None else self._shared.row_bytes

    def _pool(self) -> torch.Tensor:
        wanted, free = self.num_chunks * self.geometry.chunk_bytes, free_bytes()
        if self._shared is not None:
            pool = self._shared.open_share(self.num_chunks)
        elif wanted > free:
            share, left = f"{wanted / 2**30:.1f} GiB", f"{free / 2**30:.1f} GiB"
            allowed = f"must be less: a worker's share is {share}, and {left} are free"
            raise ConfigError("kv_tier.gib", self._host_gib, allowed)
        else:
            pool = torch.empty(wanted, dtype=torch.uint8)
        logger.info(
            "KV tier: %d blocks, %.2f GiB in this worker, %d bits%s",
            self.num_chunks, wanted / 2**30, self.geometry.bits,
            "; --kv-tier-gib takes more, less, or with 0 none" if self.options.gib == AUTO else "",
        )  # fmt: skip
        return pool


def _upstream(extra_config: Mapping[str, Any]) -> Any:
    """Return vLLM's spec of the tiers that there are."""
    if not tier_of(extra_config).disk_dir:
        return CPUOffloadingSpec
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    return TieringOffloadingSpec
