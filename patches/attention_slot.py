"""Lets vLLM's CPU platform take the attention backend of the slot ``CUSTOM``.

Upstream symbol: ``CpuPlatform.get_attn_backend_cls``, which returns ``CPU_ATTN`` whatever was asked for; CUDA's
platform takes ``CUSTOM`` as it is. Seams tried: ``register_backend`` as ``CPU_ATTN`` works, and would change
every engine of the environment. Breaks without: attention on a CPU is vLLM's own, and none of its KV stays in 8 bits.
Can go: when the CPU's platform honours ``--attention-backend``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_ext.hooks.patch import Patch


def _get_attn_backend_cls(original: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any) -> Any:
    selected = kwargs.get("selected_backend", args[0] if args else None)
    if selected is not None and selected.name == "CUSTOM" and selected.is_overridden():
        return selected.get_path()
    return original(cls, *args, **kwargs)


HOOKS = (
    Patch(
        target="vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls",
        feature="attention",
        why="returns CPU_ATTN whatever was asked for",
        breaks_without="attention on a CPU is vLLM's own",
        remove_when="the CPU's platform honours --attention-backend",
        leave_out="attention.kernel",
        optional=True,
        only=("0.31.0", "0.32.0"),
        replacement=_get_attn_backend_cls,
    ),
)
