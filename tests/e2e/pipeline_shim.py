"""Pipeline parallelism on a CPU with eager execution: import before anything of vLLM builds an engine.

vLLM's model runner makes the buffer into which a later stage receives hidden states in the forward pass that warms it
up, which its CPU worker leaves out where nothing is compiled: the first step then fails on ``assert
self.intermediate_tensors is not None``. This module makes it once the model is loaded. What runs is vLLM's own
scheduler, engine core with a queue of batches, executor and model runner, in one process per stage.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Have the CPU's model runner make the buffer, in this process and those forked from it."""
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    load_model = CPUModelRunner.load_model

    def loading(self: Any, *args: Any, **kwargs: Any) -> None:
        load_model(self, *args, **kwargs)
        if not get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    CPUModelRunner.load_model = loading  # type: ignore[method-assign]
