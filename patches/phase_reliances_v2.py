"""What computing gaps in steps of their own relies on in vLLM's V2 runner, without replacing it.

The runner counts computed tokens by itself. A request that goes on elsewhere is sent to it as a new one.
"""

from __future__ import annotations

from vllm_ext.patches.gap_hooks import gap_reliance

HOOKS = (
    gap_reliance(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.add_requests",
        "replaces what it knows of a request that is sent as a new one",
        "067603094af2c4a3",
    ),
    gap_reliance(
        "vllm.v1.core.sched.output:NewRequestData.from_request",
        "makes what is sent of a new request",
        "0874865d89590f6b",
    ),
)
