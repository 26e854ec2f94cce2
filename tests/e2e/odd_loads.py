"""Copies of the KV tier that misbehave, for engines whose core lives in this process."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from forks import HANG_S

_LAST = 2**31
"""No tensor has a greater number."""


def install(kind: str) -> None:
    """Let the copies of this process's engine misbehave; call it when the engine is there.

    Args:
        kind: ``fail``: every second load fails at its second layer, having spoilt all of it. ``tardy``: each layer of a
            load within a step is brought when its attention asks for it, or else when the step is waited for, and no
            earlier. ``tardy-nobody-asks``: and attention doesn't ask. ``tardy-nobody-waits``: it asks, and does not
            wait for the answer. ``dawdle``: every copy takes as long as it likes.

    Raises:
        KeyError: for an unknown kind.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    worker = connector.connector_worker.worker
    kinds = {
        "fail": _fail,
        "tardy": _tardy,
        "tardy-nobody-asks": _ask_nothing,
        "tardy-nobody-waits": _wait_for_nothing,
        "dawdle": _dawdle,
    }
    kinds[kind](connector, worker)


def _fail(connector: Any, worker: Any) -> None:
    codec = worker._codec
    real, tensors = codec.load, range(len(codec._pages))
    calls = {"count": 0}

    def load(tensor: int, chunks: Any, blocks: Any) -> None:
        calls["count"] += tensor == 0
        real(tensor, chunks, blocks)
        if tensor == 1 and calls["count"] % 2:
            for block in blocks[blocks >= 0]:
                for each in tensors:
                    codec._pages[each][block] = 1
            raise OSError("injected: no such chunk")

    codec.load = load


def _dawdle(connector: Any, worker: Any) -> None:
    codec, dice = worker._codec, random.Random()

    def dawdling(copy: Callable[..., Any]) -> Callable[..., Any]:
        def copying(*args: Any) -> Any:
            time.sleep(dice.choice((0, 0, 0, 0.01)))
            return copy(*args)

        return copying

    codec.load, codec.store = dawdling(codec.load), dawdling(codec.store)


class _Gate:
    """Lets the loads of the step at hand go on up to a tensor."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._last = -1

    def close(self) -> None:
        with self._changed:
            self._last = -1

    def open_up_to(self, tensor: int) -> None:
        with self._changed:
            self._last = max(self._last, tensor)
            self._changed.notify_all()

    def wait(self, tensor: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: tensor <= self._last, HANG_S):
                raise TimeoutError(f"nobody asked for tensor {tensor}")


def _tardy(connector: Any, worker: Any, *, brings_when_asked: bool = True) -> None:
    from vllm_ext.kv.host.copies import Copy, LayerCopies

    gate, run, ask = _Gate(), Copy.run, LayerCopies.wait
    begin, wait = worker.load_by_layer, worker.wait
    of_step: set[int] = set()

    def loading(self: Copy, codec: Any, tensor: int) -> None:
        if self.job_id in of_step:
            gate.wait(tensor)
        run(self, codec, tensor)

    def asking(self: LayerCopies, tensor: int | None = None) -> None:
        gate.open_up_to(_LAST if tensor is None else tensor)
        ask(self, tensor)

    def beginning(jobs: Mapping[int, Any]) -> Any:
        gate.close()
        of_step.update(jobs)
        return begin(jobs)

    def waiting(job_ids: Iterable[int]) -> None:
        gate.open_up_to(_LAST)
        wait(job_ids)

    Copy.run = loading  # type: ignore[method-assign]
    LayerCopies.wait = asking if brings_when_asked else lambda self, tensor=None: None  # type: ignore[method-assign]
    worker.load_by_layer, worker.wait = beginning, waiting


def _ask_nothing(connector: Any, worker: Any) -> None:
    _tardy(connector, worker)
    connector.wait_for_layer_load = lambda name: None


def _wait_for_nothing(connector: Any, worker: Any) -> None:
    _tardy(connector, worker, brings_when_asked=False)
