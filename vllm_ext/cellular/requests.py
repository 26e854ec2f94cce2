"""What the engine holds of a request and of a session, and why a request may fail."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_ext.cellular.arena import Arena
from vllm_ext.cellular.graphs import Ints
from vllm_ext.cellular.layout import CompiledGraph, Region

logger = logging.getLogger(__name__)


class EngineError(RuntimeError):
    """A request that was accepted and could not be served; the message says why."""


class EngineBusy(EngineError):
    """Too many requests are open."""

    def __init__(self, open_requests: int, retry_after_s: float) -> None:
        super().__init__(
            f"{open_requests} requests are open, as many as max_requests allows; retry in {retry_after_s:.0f} s"
        )
        self.retry_after_s = retry_after_s


class SessionClosed(EngineError):
    """A request of a session that was closed before it was served."""

    def __init__(self) -> None:
        super().__init__("the session is closed")


@dataclass(eq=False, repr=False)
class Request:
    """A request that was accepted."""

    graph: CompiledGraph
    future: Future[dict[str, torch.Tensor]]
    arrived_s: float
    slo_s: float | None
    answer: Callable[[Mapping[str, torch.Tensor]], dict[str, Any]]
    on_output: Callable[[Any], None] | None = None
    session: Session | None = None
    started_s: float | None = None
    ended_s: float | None = None
    number: int | None = None
    bases: Ints | None = None
    aborted: bool = False
    passed: int = 0
    """Requests that found room while this one waited for it."""

    def result(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for the answer.

        Raises:
            EngineError: it could not be computed.
            concurrent.futures.CancelledError: it was aborted.
            TimeoutError: it is not there in time; the request goes on.
        """
        return self.answer(self.future.result(timeout_s))

    def tell(self, value: Any) -> None:
        """Hand a value of the streamed result out; a client's error is logged and hurts nobody else."""
        try:
            if self.on_output is not None:
                self.on_output(value)
        except Exception:
            logger.exception("on_output of a request raised")

    @property
    def met(self) -> bool | None:
        """Whether it ended within its objective; None if it has none."""
        if self.slo_s is None or self.ended_s is None:
            return None
        return self.ended_s - self.arrived_s <= self.slo_s


class Session:
    """State that lasts from one request to the next; its requests are served one after the other."""

    def __init__(
        self, submit: Callable[..., Request], close: Callable[[Session], None], regions: list[Region], bases: Ints,
        rows: Mapping[str, int],
    ) -> None:  # fmt: skip
        self._submit, self._close = submit, close
        self.regions, self.bases, self.rows = regions, bases, rows
        self.waiting: deque[Request] = deque()
        self.running: Request | None = None
        self.closed = False
        self.used_s = time.monotonic()
        """When it was last asked for."""
        self.templates: OrderedDict[Hashable, CompiledGraph] = OrderedDict()
        self._saved: list[tuple[int, Ints, torch.Tensor]] = []

    def submit(self, request: Mapping[str, Any], **options: Any) -> Request:
        """See `CellularEngine.submit`."""
        return self._submit(request, session=self, **options)

    def save(self, arena: Arena) -> None:
        """Copy the state, before a request changes it."""
        rows = {kind: np.arange(self.bases[kind], self.bases[kind] + count) for kind, count in self.regions}
        self._saved = [(kind, own, arena.gather(kind, own)) for kind, own in rows.items()]

    def restore(self, arena: Arena) -> None:
        """Put the state back that was saved: the request has failed, perhaps half way."""
        for kind, rows, values in self._saved:
            arena.scatter(kind, rows, values)

    def close(self) -> None:
        """Give the state up; requests that were not served are aborted."""
        self._close(self)


def settle(request: Request, *, values: dict[str, torch.Tensor] | None = None, error: Exception | None = None) -> None:
    """Give a request its results or an error, unless it was aborted."""
    if not request.future.set_running_or_notify_cancel():
        return
    if error is not None:
        request.future.set_exception(error)
    else:
        request.future.set_result(values or {})
