"""Which versions of vLLM are supported: its last three minor releases."""

from __future__ import annotations

SUPPORTED = ("0.31.0", "0.32.0", "0.33.0")
"""Oldest first. A version enters when every hook was compared with it, and then the oldest leaves, with what only it
needed; README.md, pyproject.toml and docs/results/versions.md name the same versions."""


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


_OLDEST, _NEWEST = _minor(SUPPORTED[0]), _minor(SUPPORTED[-1])
TEXT = f"{_OLDEST[0]}.{_OLDEST[1]} to {_NEWEST[0]}.{_NEWEST[1]}"
"""For a sentence."""


def is_supported(version: str) -> bool:
    """Say whether a version of vLLM is one the package is meant for; each hook still checks its own symbol."""
    try:
        return _OLDEST <= _minor(version) <= _NEWEST
    except ValueError:  # "dev", of a build from source without tags
        return False
