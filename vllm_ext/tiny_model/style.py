"""The model families that the tiny model can imitate."""

from __future__ import annotations

from enum import StrEnum


class Style(StrEnum):
    """A family of architectures; the value is what users write."""

    LLAMA = "llama"
    OPT = "opt"
