"""Loads of the KV tier that misbehave, for engines whose core lives in this process."""

from __future__ import annotations

import time
from typing import Any

_SLOW_S = 0.02
"""For each layer: longer than this process takes from the start of a step to its last layer."""


def install(kind: str) -> None:
    """Let the loads of this process's engine misbehave; call it when the engine is there.

    Args:
        kind: ``fail``: every second load fails at its second layer, having spoilt all of it. ``slow``: each layer
            takes long. ``slow-nobody-asks``: and attention doesn't ask. ``slow-nobody-waits``: it asks, and does not
            wait for the answer.

    Raises:
        KeyError: for an unknown kind.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    worker = connector.connector_worker.worker
    {"fail": _fail, "slow": _slow, "slow-nobody-asks": _ask_nothing, "slow-nobody-waits": _wait_for_nothing}[kind](
        connector, worker
    )


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


def _slow(connector: Any, worker: Any) -> None:
    real = worker._codec.load

    def load(*args: Any) -> None:
        time.sleep(_SLOW_S)
        real(*args)

    worker._codec.load = load


def _ask_nothing(connector: Any, worker: Any) -> None:
    _slow(connector, worker)
    connector.wait_for_layer_load = lambda name: None


def _wait_for_nothing(connector: Any, worker: Any) -> None:
    _slow(connector, worker)
    real = worker.load_by_layer

    def load_by_layer(jobs: Any) -> Any:
        loads = real(jobs)
        loads.wait = lambda tensor=None: None
        return loads

    worker.load_by_layer = load_by_layer
