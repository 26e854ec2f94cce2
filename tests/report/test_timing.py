"""What is timed in a captured graph: the memory that it reads has to outlast it."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_ext.report.timing import captured


class Memory:
    """A tensor that only a call holds."""


def test_what_a_graph_reads_is_kept_as_long_as_it_may_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator would give it to others, and kernels of the graph would read whatever lies there then."""
    memory, replays = Memory(), []
    stream = SimpleNamespace(wait_stream=lambda _: None)
    fakes: dict[str, Any] = {
        "Stream": lambda: stream, "current_stream": lambda: stream, "stream": nullcontext, "graph": nullcontext,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: replays.append(alive())),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    alive = weakref.ref(memory)
    replay = captured([lambda memory=memory: memory], "cuda")
    del memory
    gc.collect()
    replay()
    assert replays[0] is not None
    del replay
    replays.clear()
    gc.collect()
    assert alive() is None
