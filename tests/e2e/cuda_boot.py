"""Our backend for CUDA, and vLLM's V2 runner and Triton backend with it, on a CPU: import before anything of vLLM.

All Triton kernels are run by its interpreter, element by element: correct, and slow.
"""

from __future__ import annotations


def install() -> None:
    """Let the slot hold the backend for CUDA on this platform as well."""
    import interp_boot

    interp_boot.install()

    import torch

    torch.cuda.get_device_capability = lambda *_, **__: (9, 0)

    from vllm_ext.attention import slot

    slot.PATHS = dict.fromkeys((True, False), slot.PATHS[False])
