"""What computing gaps in steps of their own relies on in vLLM's V1 runner, without replacing it.

The runner is sent a request's next position as its number of computed tokens. Can go: when vLLM's schedulers can say of
a step which positions of a request it computes.
"""

from __future__ import annotations

from vllm_ext.patches.gap_hooks import gap_reliance

HOOKS = (
    gap_reliance(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states",
        "takes the number of computed tokens from each step, also of requests that it knows",
        "79b9fe30f1472fee",
    ),
)
