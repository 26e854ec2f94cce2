"""Our options inside ``VllmConfig.additional_config``, kept out of the hash of compiled graphs.

No upstream symbol is touched. vLLM hashes ``additional_config``, so as a plain dictionary every change of a scheduling
option would make it compile the model anew, although no graph depends on it. vLLM accepts an object with its own
``compute_hash()`` instead.
"""

from __future__ import annotations

import functools
import json
from collections import UserDict
from collections.abc import Mapping
from typing import Any

from vllm_ext.config import KEY, ExtConfig, parse


class AdditionalConfig(UserDict[str, Any]):
    """A mapping whose hash leaves our options out: alone they count as no additional configuration at all."""

    def compute_hash(self) -> str:
        """Return the hash vLLM would give to what is not ours; ``None`` as text, as vLLM writes it, if nothing is."""
        others = {key: value for key, value in self.data.items() if key != KEY}
        if not others:
            return "None"
        from vllm.utils.hashing import safe_hash

        found: str = safe_hash(json.dumps(others, sort_keys=True).encode(), usedforsecurity=False).hexdigest()
        return found


def with_options(additional: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any] | AdditionalConfig:
    """Return ``additional`` with our resolved options in it.

    Some of vLLM's models read their own keys only from a real dictionary. Where there are such keys the result is one,
    and a change of our options then costs a compilation; a model that lost its settings would cost more.
    """
    merged = {**additional, KEY: dict(options)}
    return AdditionalConfig(merged) if len(merged) == 1 else merged


class _Front:
    """Our options as a front end needs them for each request."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.config = parse(options)

    @functools.cached_property
    def takes_turns_by_key(self) -> bool:
        from vllm_ext import systems

        return getattr(systems.build(self.config).sharing, "by", "") == "key"


_NO_OPTIONS: Mapping[str, Any] = {}
_fronts: list[_Front] = []
"""The last one: a front end has one configuration, and asks for each request."""


def _front(vllm_config: Any) -> _Front:
    options = (vllm_config.additional_config or {}).get(KEY) or _NO_OPTIONS
    if not _fronts or _fronts[-1].options is not options:
        _fronts[:] = [_Front(options)]
    return _fronts[-1]


def options_of(vllm_config: Any) -> ExtConfig:
    """Return our options, as they were resolved; those of no system where none was chosen."""
    return _front(vllm_config).config


def takes_turns_by_key(vllm_config: Any) -> bool:
    """Whether clients take turns by their API keys."""
    return _front(vllm_config).takes_turns_by_key
