"""What computing gaps in steps of their own relies on in vLLM's V1 runner, without replacing it.

The runner is sent a request's next position as its number of computed tokens. Can go: when vLLM's schedulers can say of
a step which positions of a request it computes.
"""

from __future__ import annotations

from vllm_ext.patches.patch import Reliance


def phase_reliance(target: str, why: str, fingerprint: str) -> Reliance:
    """Return what the way in phases relies on."""
    return Reliance(
        target=target,
        feature="gaps in kept KV",
        why=why,
        breaks_without="conversations are computed again from the first block that is missing",
        remove_when="vLLM's schedulers can say of a step which positions of a request it computes",
        leave_out="kv_tier.gaps",
        optional=True,
        verified={"0.32.0": fingerprint},
    )


HOOKS = (
    phase_reliance(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states",
        "takes the number of computed tokens from each step, also of requests that it knows",
        "79b9fe30f1472fee",
    ),
)
