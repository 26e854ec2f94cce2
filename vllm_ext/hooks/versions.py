"""Which versions of vLLM are supported: its last three minor releases."""

from __future__ import annotations

from packaging.version import Version

SUPPORTED = ("0.31.0", "0.32.0", "0.33.0")
"""Oldest first. A version enters when every hook was compared with it, and then the oldest leaves, with what only it
needed; README.md, pyproject.toml and docs/results/versions.md name the same versions."""


def _minor(version: str, later: int = 0) -> str:
    found = Version(version)
    return f"{found.major}.{found.minor + later}"


TEXT = f"{_minor(SUPPORTED[0])} to {_minor(SUPPORTED[-1])}"
"""For a sentence."""
SPECIFIER = f">={_minor(SUPPORTED[0])},<{_minor(SUPPORTED[-1], 1)}"
"""For an installer."""
