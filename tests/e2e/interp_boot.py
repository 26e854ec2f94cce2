"""vLLM's V2 model runner (the default on CUDA) on a CPU: import before anything of vLLM.

The V2 runner needs Triton, and Triton has no CPU backend in these wheels; its numpy interpreter does, once a driver is
registered that names the CPU as the device. Kernels are then run element by element: correct, and slow.
"""

from __future__ import annotations

import os
from typing import Any


def install() -> None:
    """Register an interpreter-only Triton driver for the CPU and ask vLLM for the V2 model runner."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

    import triton.backends
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class CpuDriver:
        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cpu", 0, 0)

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("cpu")

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, *args: Any) -> int:
            return 0

        def set_current_device(self, *args: Any) -> None: ...

    triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=CpuDriver)
    driver.set_active(CpuDriver())
