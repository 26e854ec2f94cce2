"""What copies need of a device: streams, events, and host memory that it reads and writes by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch

logger = logging.getLogger("vllm.vllm_ext.kv")

Stream = Any
Event = Any


class Device(Protocol):
    """Queues of work that a device does on its own, and marks in them."""

    def new_stream(self, *, urgent: bool) -> Stream:
        """Return a new queue; where the device has to choose, the ``urgent`` go first."""
        ...

    def record(self, stream: Stream | None) -> Event:
        """Mark the end of what was put into a queue so far; None stands for the queue that the engine computes in."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Let what is put into a queue from now on wait for a mark; returns at once."""
        ...

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        """Put work into a queue; what ``work`` raises comes out here."""
        ...

    def is_through(self, event: Event) -> bool:
        """Return whether everything before the mark has been done, without waiting."""
        ...

    def synchronize(self, event: Event) -> None:
        """Return when everything before the mark has been done."""
        ...

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Return the seconds between two marks that the device is through with."""
        ...


class CudaDevice:
    """A CUDA device, as torch has it.

    Args:
        device: Which one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_stream(self, *, urgent: bool) -> torch.cuda.Stream:
        """Return a stream."""
        return torch.cuda.Stream(self._device, priority=-1 if urgent else 0)

    def record(self, stream: torch.cuda.Stream | None) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device) if stream is None else stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Let a stream wait for an event."""
        stream.wait_event(event)

    def launch(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
        """Do what launches kernels and copies with the stream as the current one."""
        with torch.cuda.stream(stream):
            work()

    def is_through(self, event: torch.cuda.Event) -> bool:
        """Query an event."""
        return bool(event.query())

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Wait for an event."""
        event.synchronize()

    def elapsed_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the seconds between two events."""
        return float(start.elapsed_time(end)) / 1e3


class PinnedMemory:
    """Keeps host memory in its place while it lives, so that a device copies from and to it by itself.

    torch's own pinned tensors are not used: their allocator rounds up to a power of two, so that a pool of 40 GiB
    would take 64. Where memory can't be pinned, copies work nevertheless, but slowly: CUDA goes through a buffer
    of its own, and a copy to the host keeps the engine's thread until it is through.

    Args:
        memory: Any host memory; from its first element to its last, all is pinned.

    Attributes:
        pinned: Whether that worked; if not, it was logged.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        steps = ((size - 1) * stride for size, stride in zip(memory.shape, memory.stride(), strict=True))
        self._num_bytes = (sum(steps) + 1) * memory.element_size()
        self.pinned = False
        try:
            error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), self._num_bytes, 0))
        except (RuntimeError, AssertionError) as failure:  # no CUDA in this build of torch, or no device
            self._warn(str(failure))
            return
        self.pinned = error == 0
        if error:
            _forget_error()
            self._warn(f"CUDA error {error}")

    def close(self) -> None:
        """Give the memory back; no copy may be under way. A second call does nothing."""
        if self.pinned:
            self.pinned = False
            if int(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())):
                _forget_error()

    def _warn(self, why: str) -> None:
        size = self._num_bytes / 2**30
        logger.warning("%.2f GiB of host memory for KV can't be pinned (%s): copies will be slow", size, why)


def _forget_error() -> None:
    """Take an error that has been dealt with from CUDA, which would hand it to whoever launches the next kernel."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        logger.debug("an error of CUDA that was expected: %s", error)
