"""vLLM's CUDA platform without a GPU: import and `install` before anything of vLLM.

The platform, the worker, the model runners, the scheduler, the sampler and the KV cache are vLLM's own, and so are its
choices for a GPU of capability 9.0. Tensors lie on the CPU, Triton's kernels run in its interpreter, and streams and
events order nothing, since everything is done when it is launched. The few operators of vLLM's compiled CUDA extensions
that a Llama needs are in torch (`fake_cuda_ops`). Not there: FlashAttention's kernels, CUDA graphs, NCCL.

It works with vLLM's build for CPUs, whose Python is the same.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterable
from typing import Any, Self

CAPABILITY = (9, 0)
MEMORY_BYTES = 80 * 2**30
PROCESSORS = 4
"""Few, so that a kernel whose grid depends on them stays small."""
COMPILED = ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa3_C")
"""Imported for the operators that they register; those of `fake_cuda_ops` stand for them."""

NOTHING = ("synchronize", "set_stream", "set_device", "empty_cache", "manual_seed_all", "reset_peak_memory_stats")
"""Functions of `torch.cuda` that do nothing here."""


class Inert:
    """A stream or an event where everything is already done."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = "cpu"

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0

    def record_event(self, event: Any = None) -> Any:
        return event or Inert()

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    record = wait = synchronize = wait_stream = wait_event = _nothing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


def install() -> None:
    """Make this process one with a GPU, as far as vLLM can tell."""
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    _interpret_triton()
    _replace_cuda_of_torch()
    for name in COMPILED:
        sys.modules[name] = types.ModuleType(name)

    import fake_cuda_ops

    fake_cuda_ops.install()
    _take_the_platform()


def _interpret_triton() -> None:
    os.environ["TRITON_INTERPRET"] = "1"

    import triton.backends
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class Driver:
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

    # vLLM wants one active driver, and counts none called "cpu"; its build for CPUs wants one of that name besides.
    for name in ("cpu", "fake"):
        triton.backends.backends[name] = triton.backends.Backend(compiler=None, driver=Driver)
    driver.set_active(Driver())


def _replace_cuda_of_torch() -> None:
    import torch

    properties = types.SimpleNamespace(
        name="fake", major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=PROCESSORS,
        total_memory=MEMORY_BYTES, is_integrated=False,
    )  # fmt: skip
    cuda: Any = torch.cuda
    cuda.Event = cuda.Stream = torch.Event = Inert  # type: ignore[misc,assignment]
    cuda.stream = cuda.device = contextlib.nullcontext
    _replace(cuda, NOTHING, None)
    _replace(cuda, ("current_stream", "default_stream"), Inert())
    _replace(cuda, ("current_device", "max_memory_allocated"), 0)
    _replace(cuda, ("get_device_capability",), CAPABILITY)
    _replace(cuda, ("get_device_properties",), properties)
    _replace(cuda.memory, ("get_allocator_backend",), "none")
    _replace(torch.accelerator, ("synchronize", "empty_cache", "empty_host_cache", "set_device_index"), None)
    _replace(torch.accelerator, ("device_count",), 1)
    _replace(torch.accelerator, ("max_memory_allocated",), 0)
    _replace(torch.accelerator, ("get_memory_info",), (MEMORY_BYTES, MEMORY_BYTES))


def _replace(module: Any, names: Iterable[str], answer: Any) -> None:
    """Let functions give an answer, whatever they are asked; one each, because torch's compiler tells them apart."""
    for name in names:
        if hasattr(module, name):  # older versions of torch do not have all
            setattr(module, name, lambda *args, **kwargs: answer)


def _take_the_platform() -> None:
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class FakeCuda(NonNvmlCudaPlatform):
        device_type = "cpu"
        dispatch_key = "CPU"
        dist_backend = "gloo"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*CAPABILITY)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "fake"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return MEMORY_BYTES

        @classmethod
        def device_count(cls) -> int:
            return 1

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return False

        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            super().check_and_update_config(vllm_config)
            vllm_config.parallel_config.worker_cls = "fake_cuda_worker.FakeCudaWorker"

    vllm.platforms._current_platform = FakeCuda()
