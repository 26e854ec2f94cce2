"""The attention backend ``CUSTOM`` on CUDA: vLLM's ``FLASH_ATTN`` or ``TRITON_ATTN``, with our kernel where it serves.

vLLM's backend writes the KV in either case, and serves prefill as long as no block of it is in 8 bits: on Hopper its
kernel is several times faster there. An engine with ``attention.kernel: auto`` does not come here (`support`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionCGSupport

from vllm_ext.attention.counts import COUNTS
from vllm_ext.attention.own_steps import OwnStep, OwnSteps
from vllm_ext.attention.plan import Kernel, KernelPlan, Kind
from vllm_ext.attention.records import HearsOfRecords, UnpacksRecords, has_records, note_reads, records_behind
from vllm_ext.attention.slot import stock_cuda_backend
from vllm_ext.attention.support import FIELD, chosen_kernel, layer_obstacle, layers_kernel, refuse_what_comes_later
from vllm_ext.config.attention import OWN
from vllm_ext.config.errors import ConfigError
from vllm_ext.kernels.kv_quant.format import PageLayout, Side
from vllm_ext.kernels.paged_attention import PagedKV, gpu
from vllm_ext.kv.int8.worker import current

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.vllm_ext")
_OURS = "vllm_ext_step"
"""Attribute of a step's metadata: its `OwnStep`, where our kernel serves it."""
_STOCK: Any = stock_cuda_backend()
_PLAN = KernelPlan(
    serves={Kind.DECODE: Kernel.OWN, Kind.SHORT: Kernel.OWN, Kind.PREFILL: Kernel.STOCK},
    writer=Kernel.STOCK,
    why=f"{FIELD}={OWN}; prefill that reads KV in 8 bits is ours too",
)


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
        window = getattr(self, "sliding_window", None) or (-1, -1)
        self.window, self.softcap = window[0] + 1, float(self.logits_soft_cap or 0.0)
        self._bound: dict[bool, PagedKV] = {}
        self._bound_to: int | None = None

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
        own: OwnStep | None = getattr(attn_metadata, _OURS, None)
        if own is None:
            found: torch.Tensor = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
            return found
        if any(scale is not None for scale in (*args, *kwargs.values())):
            raise NotImplementedError(f"{FIELD}: fused quantisation of outputs needs stock")
        kv, count = self._kv(kv_cache, with_int8=own.reads_int8), own.num_tokens
        gpu.attend(
            query[:count], kv, own.step, output[:count], scale=self.scale, window=self.window, softcap=self.softcap
        )
        return output

    def _kv(self, kv_cache: torch.Tensor, *, with_int8: bool) -> PagedKV:
        """Return this layer's KV as our kernel wants it: made once, and again after a sleep that moved the cache."""
        if self._bound_to != kv_cache.data_ptr():
            self._bound, self._bound_to = {}, kv_cache.data_ptr()
        if with_int8 not in self._bound:
            self._bound[with_int8] = paged(kv_cache, records_behind(kv_cache) if with_int8 else None)
        return self._bound[with_int8]


class CudaBuilder(HearsOfRecords, _STOCK.get_builder_cls()):  # type: ignore[misc]
    """Builds a step's metadata for the kernel that serves it, and chooses the kernels at start."""

    supports_update_block_table = False
    """A step of ours has the block table in it."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        """Choose which kernel serves what, say so in the log, and compile ours.

        Raises:
            ConfigError: ours was asked for and can't serve a layer.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = list(get_layers_from_vllm_config(vllm_config, Attention, layer_names).values())
        kernel, _ = layers_kernel(vllm_config, (layer.impl.obstacle for layer in layers))
        self.plan = _PLAN if kernel == OWN else KernelPlan.all(Kernel.STOCK, f"{FIELD}={kernel}")
        self.check_pages(layers)
        self._dtype = str(kv_cache_spec.dtype).removeprefix("torch.")
        logger.info("%s", self.plan.describe(_STOCK.get_name()))
        self._steps = self._own_steps([layer.impl for layer in layers]) if kernel == OWN else None
        if self._steps is not None:
            self.supports_draft_decode_metadata_update = False  # a draft's steps are divided anew, one by one

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:  # noqa: ARG003
        """Say that our kernel can be captured in decode, and nothing where a step may read blocks in 8 bits.

        Which it reads, and that it reads any, is seen when it comes, and not when a graph is captured.
        """
        own = chosen_kernel(vllm_config) == OWN and not has_records(vllm_config)
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if own else AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Build the metadata of a step, as vLLM's; see there."""
        common, at_hand = common_attn_metadata, current()
        reads_int8 = at_hand is not None and bool(at_hand.reads)
        kernel = self.plan.serves[Kind.of(common.max_query_len)]
        if reads_int8 and self._steps is not None:
            kernel = Kernel.OWN
        is_own = kernel is Kernel.OWN
        metadata = super().build(common_prefix_len, common, fast_build or is_own)  # no schedule for a kernel that rests
        note_reads(metadata, common.seq_lens, self.kv_cache_spec.block_size, unpack=not is_own)
        COUNTS.add(kernel, int(common.seq_lens_cpu_upper_bound[: common.num_reqs].sum()), self._dtype)
        if is_own:
            assert self._steps is not None
            refuse_what_comes_later(common.causal)
            setattr(metadata, _OURS, self._steps.of(common, reads_int8=reads_int8))
        return metadata

    def _own_steps(self, impls: list[CudaImpl]) -> OwnSteps:
        spec, scheduler = self.kv_cache_spec, self.vllm_config.scheduler_config
        heads = {impl.num_heads for impl in impls}
        if len(heads) > 1:
            raise ConfigError(FIELD, OWN, f"must be stock or auto: layers have {sorted(heads)} query heads")
        steps = OwnSteps(
            PageLayout.tokens_first(spec.dtype, spec.num_kv_heads, spec.head_size, spec.block_size),
            heads.pop(),
            max_rows=max(scheduler.max_num_seqs, self.vllm_config.compilation_config.max_cudagraph_capture_size or 0),
            max_tokens=scheduler.max_num_batched_tokens,
            limits=gpu.DeviceLimits.of(self.device),
            device=self.device,
        )
        if self.device.type == "cuda":
            steps.warm_up(((impl.window, impl.softcap) for impl in impls), has_int8=self.has_records)
        return steps


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
