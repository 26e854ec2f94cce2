"""LoRA on a CPU as it is on a GPU: rows of requests without an adapter get none.

vLLM 0.32 marks them by the index -1. Its kernels for CPUs (`vllm.lora.ops.torch_ops`) look that up like any other
index, so that such a row gets the adapter in the last place whenever a row beside it has any: what a request says then
depends on its neighbours, under vLLM's own scheduler too (vllm-project/vllm#48421).
"""

from __future__ import annotations

from typing import Any


def mend() -> None:
    """Let them compute nothing for such rows, in this process: call it once, before the engine is built."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink

    def shrinking(inputs: Any, weights: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
        shrink(inputs, weights, output, indices, scaling)
        output[: len(indices)][indices < 0] = 0.0  # which nothing is added for when it is expanded

    for module in (lora_ops, punica_cpu):
        module.bgmv_shrink = shrinking  # type: ignore[attr-defined]
