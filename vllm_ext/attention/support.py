"""Whether our kernel can serve an engine, said in the process that the user sees.

What only layers know, such as attention sinks, a worker finds when it builds them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm_ext.attention import slot
from vllm_ext.config.attention import AUTO, OWN, STOCK
from vllm_ext.config.errors import KEY, ConfigError
from vllm_ext.kernels.native import CompilerMissing, compiler_version
from vllm_ext.kernels.paged_attention.format import MAX_GROUP, STEP

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.vllm_ext")
FIELD = "attention.kernel"
DTYPES = ("auto", "bfloat16", "float16", "float32")
"""Types of KV cache that are the type of the KV."""
LEAST_CAPABILITY = 80
"""Of a CUDA device, times ten: kernels prefetch with cp.async."""
STOCK_NAMES = {True: ("CPU_ATTN",), False: ("FLASH_ATTN", "TRITON_ATTN")}
"""Backends that ours is a subclass of, by whether the platform is the CPU; the first is the default."""


def obstacle(vllm_config: VllmConfig) -> str | None:
    """Return what keeps our kernel from serving an engine; None: nothing that is known before it starts."""
    from vllm import envs
    from vllm.platforms import current_platform

    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    attention = vllm_config.attention_config
    head_dim, on_cpu = model.get_head_size(), current_platform.is_cpu()
    group = model.get_num_attention_heads(parallel) // max(1, model.get_num_kv_heads(parallel))
    context_parallel = parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1
    chosen = getattr(attention.backend, "name", None)
    known = (None, slot.NAME, *STOCK_NAMES[on_cpu])
    holder = slot.other_holder()
    block_size = cache.block_size if cache.user_specified_block_size else STEP
    found = {
        "the model has no keys and values (MLA)": model.use_mla,
        "the model has state besides keys and values (hybrid, Mamba)": model.is_hybrid or model.is_attention_free,
        "the model attends to an encoder": model.is_encoder_decoder,
        "the model attends to what comes later (no generation)": model.runner_type != "generate"
        or attention.use_non_causal,
        "the model attends to what comes later (within images)": model.is_mm_prefix_lm,
        "the model's window slides behind a prompt that stays (R-SWA)": model.rswa_window is not None,
        f"--kv-cache-dtype {cache.cache_dtype} is quantised": cache.cache_dtype not in DTYPES,
        f"heads of {head_dim} numbers are no multiple of 32 up to 512": on_cpu
        and bool(head_dim % 32 or head_dim > 512),
        f"{group} query heads share a KV head, more than {MAX_GROUP}": group > MAX_GROUP,
        f"--block-size {block_size} is no multiple of {STEP}": on_cpu and bool(block_size % STEP),
        f"--block-size {block_size} is no power of two": not on_cpu and bool(block_size & (block_size - 1)),
        "context parallelism splits sequences by position": context_parallel,
        "batch invariance needs splits that depend on one request only": envs.VLLM_BATCH_INVARIANT,
        f"--attention-backend {chosen} was given": chosen not in known,
        "backends by kind of layer were given (backend_per_kind)": bool(attention.backend_per_kind),
        f"another plugin holds vLLM's slot for attention backends: {holder}": holder is not None,
    }
    if (reason := next((reason for reason, is_so in found.items() if is_so), None)) is not None:
        return reason
    return no_compiler() if on_cpu else stock_obstacle(vllm_config)


def stock_obstacle(vllm_config: VllmConfig) -> str | None:
    """Return what keeps vLLM's backend on CUDA, of which ours is a subclass, from serving an engine; None: nothing.

    vLLM itself would take another backend, and of one that it is told to take says less: ``dtype not supported``.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    model, cache, transfer = vllm_config.model_config, vllm_config.cache_config, vllm_config.kv_transfer_config
    capability = current_platform.get_device_capability()
    if capability is None or capability.to_int() < LEAST_CAPABILITY:
        known = capability and capability.as_version_str()
        return f"the device is of compute capability {known}, and 8.0 is the least"
    backend = slot.stock_cuda_backend()
    asked = AttentionSelectorConfig(
        head_size=model.get_head_size(),
        dtype=model.dtype,
        kv_cache_dtype=cache.cache_dtype,
        block_size=cache.block_size if cache.user_specified_block_size else None,
        has_sliding_window=model.get_sliding_window() is not None,
        use_kv_connector=transfer is not None,
    )
    reasons = backend.validate_configuration(device_capability=capability, **asked._asdict())
    if not reasons:
        return None
    facts = f"--dtype {model.dtype}, heads of {model.get_head_size()} numbers".replace("torch.", "")
    return f"vLLM's {backend.get_name()}, which ours is built on, can't serve it: {', '.join(reasons)} ({facts})"


def let_own_kernel_serve(vllm_config: VllmConfig, kernel: str, unverified: str | None = None) -> str:
    """Choose our attention backend for an engine, if it can serve it.

    Args:
        vllm_config: Of an engine that is about to start; changed.
        kernel: ``own`` or ``auto``.
        unverified: How this vLLM differs from those that it was verified with, if it does.

    Returns:
        What its workers are to be told: ``stock`` where ``auto`` leaves everything to vLLM's kernel. It does so on
        CUDA, where neither kernel was measured, and where there is an obstacle, which is a warning.

    Raises:
        ConfigError: ``own`` was asked for and can't be.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if kernel == AUTO and not current_platform.is_cpu():
        logger.info("attention: vLLM's kernel serves all steps (%s=%s on CUDA)", FIELD, AUTO)
        return STOCK
    reason = unverified or obstacle(vllm_config)
    if reason is None:
        vllm_config.attention_config.backend = AttentionBackendEnum[slot.NAME]
        return kernel
    if kernel != AUTO:
        raise ConfigError(FIELD, kernel, f"must be stock or auto: {reason}")
    logger.warning("attention: vLLM's kernel serves all steps: %s", reason)
    return STOCK


def chosen_kernel(vllm_config: VllmConfig) -> str:
    """Return which kernel an engine's workers were told to use."""
    options = (vllm_config.additional_config or {}).get(KEY) or {}
    kernel: str = (options.get("attention") or {}).get("kernel", STOCK)
    return kernel


def layers_kernel(vllm_config: VllmConfig, obstacles: Iterable[str | None]) -> tuple[str, str | None]:
    """Return which kernel some layers were told to use, and what keeps ours from serving them.

    Args:
        vllm_config: Of the engine.
        obstacles: Of each layer, as `layer_obstacle` said.

    Raises:
        ConfigError: ours was asked for and can't serve a layer.
    """
    kernel, found = chosen_kernel(vllm_config), next(filter(None, obstacles), None)
    if kernel == OWN and found is not None:
        raise ConfigError(FIELD, kernel, f"must be stock or auto: {found}")
    return kernel, found


def refuse_what_comes_later(causal: object) -> None:
    """Refuse a step that our kernel can't serve.

    Raises:
        ConfigError: it attends to what comes later.
    """
    if causal is not True:
        raise ConfigError(FIELD, OWN, "must be stock: a step attends to what comes later")


def layer_obstacle(*, alibi: bool, sinks: bool, kv_cache_dtype: str, attn_type: str) -> str | None:
    """Return what keeps our kernel from serving a layer; None: nothing."""
    found = {
        "a layer has ALiBi": alibi,
        "a layer has attention sinks": sinks,
        f"a layer's KV cache is of type {kv_cache_dtype}": kv_cache_dtype not in DTYPES,
        f"a layer's attention is of type {attn_type}": attn_type != "decoder",
    }
    return next((reason for reason, is_so in found.items() if is_so), None)


def no_compiler() -> str | None:
    """Return what keeps the kernel for the CPU from being compiled, and the remedy; None: nothing."""
    try:
        compiler_version()
    except CompilerMissing as error:
        return str(error)
    return None
