"""What all hooks for gaps in kept KV have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm_ext.hooks.patch import Patch, Reliance
from vllm_ext.hooks.versions import SUPPORTED

POSITIONS = "vLLM's schedulers can say of a step which positions of a request it computes"
"""What must come upstream before workers, and those who count for them, need no help."""
FUSED_VERSIONS = ("0.32.0", "0.33.0")
"""In which one method hands the rows of a batch to all attention backends, so that gaps can be computed in one step."""


def gap_reliance(target: str, why: str, *fingerprints: str, remove_when: str = POSITIONS) -> Reliance:
    """Return a reliance on a function; one fingerprint if it is the same in all versions, else one each."""
    return Reliance(
        target=target,
        why=why,
        feature="gaps in kept KV",
        breaks_without="conversations are computed again from the first block that is missing",
        remove_when=remove_when,
        **_common(SUPPORTED, fingerprints),
    )


def gap_patch(target: str, why: str, replacement: Callable[..., Any], *fingerprints: str) -> Patch:
    """Return a patch of a worker; one fingerprint if it is the same in all `FUSED_VERSIONS`, else one each."""
    return Patch(
        target=target,
        why=why,
        feature="gaps in kept KV in one step",
        breaks_without="gaps are computed in steps of their own",
        remove_when=POSITIONS,
        replacement=replacement,
        **_common(FUSED_VERSIONS, fingerprints),
    )


def _common(versions: Sequence[str], fingerprints: tuple[str, ...]) -> dict[str, Any]:
    each = fingerprints * len(versions) if len(fingerprints) == 1 else fingerprints
    return {"leave_out": "kv_tier.gaps", "optional": True, "verified": dict(zip(versions, each, strict=True))}
