"""What records on the device are refused for in the process that the user sees; the rest is seen when layers are built.

`geometry.with_arenas` refuses KV of other kinds than full attention, and `vllm_ext.attention.records` kinds of
attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm import envs
from vllm.platforms import current_platform

from vllm_ext.attention.slot import other_holder
from vllm_ext.attention.support import stock_obstacle
from vllm_ext.config.errors import ConfigError
from vllm_ext.kv.int8.geometry import SHARE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BACKEND = "CUSTOM"
PLAIN_TYPES = ("auto", "bfloat16", "float16")
"""Of ``--kv-cache-dtype``."""


def obstacle(vllm_config: VllmConfig) -> str | None:
    """Return what keeps an engine from keeping KV in records; None: nothing that is known before it starts."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    kinds = vllm_config.attention_config.backend_per_kind
    chosen, transfer = vllm_config.attention_config.backend, vllm_config.kv_transfer_config
    full_graphs = vllm_config.compilation_config.cudagraph_mode.mixed_mode().name == "FULL"
    context_parallel = parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1
    holder = other_holder()
    found = {
        "it has no keys and values to quantise (MLA)": model.use_mla,
        "it has state besides keys and values (hybrid, Mamba)": model.is_hybrid or model.is_attention_free,
        "without prefix caching nothing is kept": not cache.enable_prefix_caching,
        f"--kv-cache-dtype {cache.cache_dtype} is quantised already": cache.cache_dtype not in PLAIN_TYPES,
        "speculative decoding computes drafts outside of a step": vllm_config.speculative_config is not None,
        "context parallelism splits sequences by position": context_parallel,
        "hashes are finer than blocks": cache.prefix_match_unit is not None,
        f"--attention-backend {getattr(chosen, 'name', '')} knows no records; leave it out": (
            chosen is not None and chosen.name != BACKEND
        ),
        "attention backends by kind of layer (backend_per_kind) know no records": bool(kinds),
        "batch invariance needs one kernel for all steps": envs.VLLM_BATCH_INVARIANT,
        "full CUDA graphs are replayed whatever a step reads; use --cudagraph-mode PIECEWISE": full_graphs,
        "--kv-transfer-config names a connector, and none knows records": transfer is not None,
        f"another plugin holds vLLM's slot for attention backends: {holder}": holder is not None,
    }
    if (reason := next((reason for reason, is_so in found.items() if is_so), None)) is not None:
        return reason
    return None if current_platform.is_cpu() else stock_obstacle(vllm_config)


def let_records_be_read(vllm_config: VllmConfig, share: float) -> None:
    """Choose the attention backend that reads records.

    Args:
        vllm_config: Of an engine that is about to start; changed.
        share: Of the device's blocks that are to hold records.

    Raises:
        ConfigError: this engine can't keep KV in records.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    reason = obstacle(vllm_config)
    if reason is not None:
        raise ConfigError(SHARE, share, f"must be 0: {reason}")
    vllm_config.attention_config.backend = AttentionBackendEnum[BACKEND]
