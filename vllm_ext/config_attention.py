"""Options of attention."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ext.config_checks import choice

STOCK, OWN, AUTO = "stock", "own", "auto"
KERNELS = (STOCK, OWN, AUTO)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Which kernel computes attention."""

    kernel: str = STOCK
    """``stock``: vLLM's; ``own``: ours for everything; ``auto``: for each kind of step (decode, a few tokens, prefill)
    the one that was measured to be faster at start, and vLLM's where ours can't serve the model."""

    def __post_init__(self) -> None:
        choice("attention.kernel", self.kernel, KERNELS)
