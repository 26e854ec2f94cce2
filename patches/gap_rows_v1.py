"""Lets vLLM's V1 model runner compute a step whose requests have gaps in what is kept of them.

Upstream symbols: three methods of ``GPUModelRunner``, which the CPU's runner inherits. Seams tried: positions have
none. Breaks without: conversations are computed again from the first gap on. Can go: when vLLM's schedulers can say of
a step which positions of a request it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_ext.kv.partial_prefix.layout import ATTRIBUTE
from vllm_ext.kv.partial_prefix.rows import Rows, place_queries
from vllm_ext.patches.gap_attention import splitting
from vllm_ext.patches.gap_hooks import FUSED

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_STEP = "_vllm_ext_gaps"


class _Step:
    """What a runner has to do about the gaps of the step at hand."""

    def __init__(self, layouts: Any) -> None:
        self.layouts = layouts
        self.rows: Rows = {}


def _prepare_inputs(original: Callable[..., Any], self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    layouts = getattr(scheduler_output, ATTRIBUTE, None)
    setattr(self, _STEP, _Step(layouts) if layouts else None)
    return original(self, scheduler_output, *args, **kwargs)


def _get_cumsum_and_arange(
    original: Callable[..., Any], self: Any, num_tokens: Any, arange_out: Any, *args: Any, **kwargs: Any
) -> Any:
    ends = original(self, num_tokens, arange_out, *args, **kwargs)
    step = getattr(self, _STEP, None)
    if step is not None and arange_out is self.query_pos.np:
        batch = self.input_batch
        step.rows = place_queries(
            step.layouts, batch.req_ids, batch.num_computed_tokens_cpu, num_tokens, ends, arange_out
        )
    return ends


def _build_attention_metadata(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    step = getattr(self, _STEP, None)
    if step is None:
        return original(self, *args, **kwargs)
    setattr(self, _STEP, None)  # what is built without inputs, as for a dummy run, is not this step's
    with splitting(step.rows):
        return original(self, *args, **kwargs)


HOOKS = (
    FUSED.patch(
        f"{_RUNNER}._prepare_inputs",
        "is the first that is told of a step",
        _prepare_inputs,
    ),
    FUSED.patch(
        f"{_RUNNER}._get_cumsum_and_arange",
        "makes the indices from which tokens, positions and the places of their KV follow",
        _get_cumsum_and_arange,
    ),
    FUSED.patch(
        f"{_RUNNER}._build_attention_metadata",
        "knows whose metadata are built; a dummy run's must not be changed",
        _build_attention_metadata,
    ),
)
