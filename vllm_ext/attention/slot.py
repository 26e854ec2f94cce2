"""vLLM's slot for attention backends of others, and who holds it."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

NAME = "CUSTOM"
"""Of the slot; the one name for backends of others that survives the way to vLLM's other processes."""
PATHS = {True: "vllm_ext.attention.cpu.CpuBackend", False: "vllm_ext.attention.cuda.CudaBackend"}
"""Our backend, by whether the platform is the CPU."""


_FLASH_CAPABILITY = 80


def path() -> str:
    """Return our backend on this platform."""
    return PATHS[current_platform.is_cpu()]


def stock_cuda_backend() -> Any:
    """Return vLLM's backend on CUDA, of which ours is a subclass."""
    if current_platform.is_cuda() and current_platform.has_device_capability(_FLASH_CAPABILITY):
        from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

        return FlashAttentionBackend
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    return TritonAttentionBackend


def take_slot() -> None:
    """Register our backend, unless another plugin has registered its own; nobody gets it who does not ask for it."""
    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, path())


def other_holder() -> str | None:
    """Return the backend in the slot that is not ours, if there is one."""
    slot = AttentionBackendEnum.CUSTOM
    found = slot.get_path() if slot.is_overridden() else path()
    return None if found in PATHS.values() else found
