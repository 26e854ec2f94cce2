"""Lets a request be several rows of attention, whatever the backend and the model runner.

Upstream symbol: ``AttentionGroup.build_metadata``, through which both runners have the metadata of any backend built.
Seams tried: an attention backend of our own could split rows, but would have to be every backend at once.
Breaks without: conversations are computed again from the first gap on. Can go: when vLLM's schedulers can say of a step
which positions of a request it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_ext.kv.partial_prefix.rows import Rows, split_rows
from vllm_ext.patches.gap_hooks import FUSED

_building: Rows | None = None
"""The rows of the step whose metadata are being built; a worker builds those of one step at a time."""


@contextmanager
def splitting(rows: Rows) -> Iterator[None]:
    """Split rows of the metadata that are built meanwhile."""
    global _building  # noqa: PLW0603 - a process has one worker
    _building = rows
    try:
        yield
    finally:
        _building = None


def _build_metadata(
    original: Callable[..., Any], self: Any, common_attn_metadata: Any, *args: Any, **kwargs: Any
) -> Any:
    if _building:
        common_attn_metadata = split_rows(common_attn_metadata, _building)
    return original(self, common_attn_metadata, *args, **kwargs)


HOOKS = (
    FUSED.patch(
        "vllm.v1.worker.utils:AttentionGroup.build_metadata",
        "hands the rows of a batch to any attention backend",
        _build_metadata,
    ),
)
