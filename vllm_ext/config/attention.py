"""Options of attention."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from vllm_ext.config.model import Flag, Options

STOCK, OWN, AUTO = "stock", "own", "auto"


class AttentionConfig(Options):
    """Which kernel computes attention."""

    at: ClassVar[str] = "attention"

    kernel: Annotated[Literal["stock", "own", "auto"], Flag("--ext-attention-kernel", metavar="WHICH")] = "stock"
    """Which kernel computes attention. ``stock``: vLLM's. ``own``: ours, for everything. ``auto``: for each kind of
    step (decode, a few tokens, prefill) the faster one as measured at start, and vLLM's where ours can't serve the
    model."""
