"""The error of a refused option, and the checks that raise it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

KEY = "vllm_ext"
"""Key of our options in ``additional_config``."""


class ConfigError(ValueError):
    """An option of vllm-ext is unknown or has a value that is not allowed.

    Attributes:
        field: Dotted name below ``vllm_ext``, such as ``prediction.window``; empty for the whole.
        value: The refused value.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        name = f"{KEY}.{field}" if field else KEY
        super().__init__(f"{name}={value!r}: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.allowed)


def strings(name: str, value: Any) -> None:
    """Raise `ConfigError` unless the value is a tuple of texts."""
    if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
        raise ConfigError(name, value, "must be a list of strings")


def text(name: str, value: Any) -> None:
    """Raise `ConfigError` unless the value is a text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(name, value, "must be a string that is not empty")


def integer(name: str, value: Any, *, minimum: int) -> None:
    """Raise `ConfigError` unless the value is a whole number of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(name, value, f"must be a whole number of at least {minimum}")


def number(name: str, value: Any) -> None:
    """Raise `ConfigError` unless the value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(name, value, "must be a finite number")


def parameters(axis: str, value: Any) -> None:
    """Raise `ConfigError` unless the value is a mapping with texts as keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(axis, value, "must be an object of the policy's parameters by name")


def boolean(name: str, value: Any) -> None:
    """Raise `ConfigError` unless the value is true or false."""
    if not isinstance(value, bool):
        raise ConfigError(name, value, "must be true or false")


def choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise `ConfigError` unless the value is one of those allowed."""
    if value not in allowed:
        raise ConfigError(name, value, f"must be one of {', '.join(allowed)}")
