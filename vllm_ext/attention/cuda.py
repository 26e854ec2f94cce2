"""The attention backend ``CUSTOM`` on CUDA: vLLM's ``FLASH_ATTN`` or ``TRITON_ATTN``, with our kernel where it serves.

vLLM's backend writes the KV in either case. ``auto`` leaves steps to vLLM's kernel here: on this platform ours is meant
for what that can't read, and neither was measured against the other on the device.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport

from vllm_ext.attention.counts import COUNTS
from vllm_ext.attention.plan import Kernel, KernelPlan, Kind
from vllm_ext.attention.records import HearsOfRecords, UnpacksRecords, note_reads, records_behind
from vllm_ext.attention.support import FIELD, layer_obstacle, layers_kernel, refuse_what_comes_later
from vllm_ext.config_attention import OWN
from vllm_ext.kernels.kv_quant.format import PageLayout, Side
from vllm_ext.kernels.paged_attention import PagedKV, Ranges, gpu

logger = logging.getLogger("vllm.vllm_ext")
_OURS = "vllm_ext_step"
"""Attribute of a step's metadata: its `OwnStep`, where our kernel serves it."""
_FLASH_CAPABILITY = 80


def _stock_backend() -> Any:
    if current_platform.is_cuda() and current_platform.has_device_capability(_FLASH_CAPABILITY):
        from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

        return FlashAttentionBackend
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    return TritonAttentionBackend


_STOCK: Any = _stock_backend()


@dataclasses.dataclass(frozen=True)
class OwnStep:
    """What our kernel needs of a step: ranges on the device, and bounds that the host knows."""

    ranges: Ranges
    num_tokens: int
    longest: int


class CudaImpl(UnpacksRecords, _STOCK.get_impl_cls()):  # type: ignore[misc]
    """Attention of one layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take vLLM's arguments; raises nothing of ours: what our kernel can't do the builder finds in `obstacle`."""
        super().__init__(*args, **kwargs)
        self.obstacle = layer_obstacle(
            alibi=self.alibi_slopes is not None,
            sinks=getattr(self, "sinks", None) is not None,
            kv_cache_dtype=self.kv_cache_dtype,
            attn_type=self.attn_type,
        )
        self._kv: PagedKV | None = None
        self._bound_to: tuple[int, bool] | None = None
        self._processors = 1
        if torch.cuda.is_available():
            self._processors = torch.cuda.get_device_properties("cuda").multi_processor_count

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend, as vLLM's; see there."""
        step: OwnStep | None = getattr(attn_metadata, _OURS, None)
        if step is None:
            found: torch.Tensor = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
            return found
        if any(scale is not None for scale in (*args, *kwargs.values())):
            raise NotImplementedError(f"{FIELD}: fused quantisation of outputs needs stock")
        window = getattr(self, "sliding_window", None) or (-1, -1)
        gpu.attend(
            query[: step.num_tokens], self._bound(kv_cache), step.ranges, output[: step.num_tokens],
            scale=self.scale, window=window[0] + 1, softcap=self.logits_soft_cap or 0.0,
            num_tokens=step.num_tokens, longest=step.longest, processors=self._processors,
        )  # fmt: skip
        return output

    def _bound(self, kv_cache: torch.Tensor) -> PagedKV:
        """Return this layer's KV as our kernel wants it: made once, and again after a sleep that moved the cache."""
        records = records_behind(kv_cache)
        wanted = kv_cache.data_ptr(), records is not None
        if self._kv is None or self._bound_to != wanted:
            self._kv, self._bound_to = paged(kv_cache, records), wanted
        return self._kv


class CudaBuilder(HearsOfRecords, _STOCK.get_builder_cls()):  # type: ignore[misc]
    """Builds a step's metadata for the kernel that serves it, and chooses the kernels at start."""

    _cudagraph_support = AttentionCGSupport.NEVER
    """The ranges of a step, and what it reads of records, are new tensors, which a captured graph would not read."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        """Choose which kernel serves what, and say so in the log.

        Raises:
            ConfigError: ours was asked for and can't serve a layer.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        kernel, _ = layers_kernel(vllm_config, (layer.impl.obstacle for layer in layers.values()))
        self.plan = KernelPlan.all(Kernel.OWN if kernel == OWN else Kernel.STOCK, f"{FIELD}={kernel}")
        self.check_pages(layers.values())
        self._dtype = str(kv_cache_spec.dtype).removeprefix("torch.")
        logger.info("%s", self.plan.describe(_STOCK.get_name()))

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """Build the metadata of a step, as vLLM's; see there."""
        common = common_attn_metadata
        metadata = super().build(common_prefix_len, common, *args, **kwargs)
        kernel = self.plan.serves[Kind.of(common.max_query_len)]
        note_reads(metadata, common.seq_lens, self.kv_cache_spec.block_size, unpack=kernel is Kernel.STOCK)
        COUNTS.add(kernel, int(common.seq_lens_cpu_upper_bound[: common.num_reqs].sum()), self._dtype)
        if kernel is Kernel.OWN:
            refuse_what_comes_later(common.causal)
            rows = common.num_reqs
            ranges = Ranges.from_block_table(
                common.query_start_loc[: rows + 1], common.seq_lens[:rows], common.block_table_tensor[:rows]
            )
            setattr(metadata, _OURS, OwnStep(ranges, common.num_actual_tokens, common.max_seq_len))
        return metadata


class CudaBackend(_STOCK):
    """vLLM's backend for CUDA, with our kernel where it serves."""

    @staticmethod
    def get_name() -> str:
        """Return the name of vLLM's slot for backends of others."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CudaImpl]:
        """Return what computes attention."""
        return CudaImpl

    @staticmethod
    def get_builder_cls() -> type[CudaBuilder]:
        """Return what builds a step's metadata."""
        return CudaBuilder


def paged(kv_cache: torch.Tensor, records: torch.Tensor | None = None) -> PagedKV:
    """Return a cache of vLLM's shape [blocks, heads, tokens, K then V] as our kernel wants it, in either order of axes.

    Raises:
        ValueError: the values of a page are not in one piece.
    """
    blocks, heads, tokens, width = kv_cache.shape
    page, head, token, channel = kv_cache.stride()
    layout = PageLayout(
        dtype=kv_cache.dtype, num_heads=heads, head_dim=width // 2, block_size=tokens, head_stride=head,
        k=Side(0, token, channel), v=Side(width // 2 * channel, token, channel),
    )  # fmt: skip
    return PagedKV(layout, kv_cache.as_strided((blocks, layout.page_elements), (page, 1)), records)
