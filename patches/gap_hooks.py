"""What all patches of workers for gaps in kept KV have in common."""

from __future__ import annotations

from vllm_ext.hooks.feature import Feature

FUSED = Feature(
    name="gaps in kept KV in one step",
    breaks_without="conversations are computed again from the first block that is missing",
    remove_when="vLLM's schedulers can say of a step which positions of a request it computes",
    leave_out="kv_tier.gaps",
    optional=True,
    only=("0.32.0", "0.33.0"),
)
"""For the versions in which one method hands the rows of a batch to all attention backends."""
