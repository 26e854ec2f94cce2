"""Real async scheduling on a CPU: import before anything of vLLM.

vLLM's CPU platform switches async scheduling off, because the model runner's overlap is written with CUDA events and
streams. The scheduler side (batch queue of two, placeholder tokens, stale output after a preemption) does not need
them, so this module puts inert stand-ins in their place and switches async scheduling on again. What runs is vLLM's
own ``AsyncScheduler``, engine core and model runner; only the overlap of copies with compute is missing.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch


class _InertStream:
    """Stands for a CUDA stream where everything is already synchronous."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> _InertEvent:
        return event if event is not None else _InertEvent()

    def query(self) -> bool:
        return True


class _InertEvent:
    """Stands for a CUDA event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def install() -> None:
    """Put the stand-ins in place and keep the CPU platform from switching async scheduling off."""
    torch.cuda.Event = _InertEvent  # type: ignore[misc,assignment]
    torch.cuda.Stream = _InertStream  # type: ignore[misc,assignment]
    torch.cuda.current_stream = lambda *args, **kwargs: _InertStream()  # type: ignore[assignment,misc]
    torch.cuda.stream = lambda *args, **kwargs: nullcontext()  # type: ignore[assignment,misc]

    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type[Any], vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore[method-assign]
