"""Lets vLLM's V2 model runner compute a step whose requests have gaps in what is kept of them.

Upstream symbols: ``GPUModelRunner.prepare_inputs``, after which positions and tokens are set right on the device, and
``DefaultModelState.prepare_attn``, which has the metadata of a batch built. Seams tried: positions have none. Breaks
without: conversations are computed again from the first gap on. Can go: when vLLM's schedulers can say of a step which
positions of a request it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_ext.kv.partial_prefix.layout import ATTRIBUTE
from vllm_ext.kv.partial_prefix.rows import place_on_device
from vllm_ext.patches.gap_attention import splitting
from vllm_ext.patches.gap_hooks import FUSED

_ROWS = "_vllm_ext_rows"


def _prepare_inputs(original: Callable[..., Any], self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    batch = original(self, scheduler_output, *args, **kwargs)
    layouts = getattr(scheduler_output, ATTRIBUTE, None)
    if layouts:
        setattr(batch, _ROWS, place_on_device(layouts, batch, self.req_states.all_token_ids.gpu))
    return batch


def _prepare_attn(original: Callable[..., Any], self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
    rows = getattr(input_batch, _ROWS, None)
    if not rows:
        return original(self, input_batch, *args, **kwargs)
    with splitting(rows):
        return original(self, input_batch, *args, **kwargs)


HOOKS = (
    FUSED.patch(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_inputs",
        "makes tokens and positions, from which the places of their KV follow",
        _prepare_inputs,
    ),
    FUSED.patch(
        "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_attn",
        "knows for which batch metadata are built",
        _prepare_attn,
    ),
)
