"""Checks of policy parameters."""

from __future__ import annotations

from vllm_ext.config import ConfigError


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raise ConfigError naming field, value and what is allowed, unless ``condition`` holds."""
    if not condition:
        raise ConfigError(field, value, allowed)
