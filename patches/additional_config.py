"""Our options inside ``VllmConfig.additional_config``, kept out of the hash of compiled graphs.

No upstream symbol is touched. vLLM hashes ``additional_config``, so as a plain dictionary every change of a scheduling
option would make it compile the model anew, although no graph depends on it. vLLM accepts an object with its own
``compute_hash()`` instead.
"""

from __future__ import annotations

import json
from collections import UserDict
from collections.abc import Mapping
from typing import Any

from vllm_ext.config import KEY, parse


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


def takes_turns_by_key(vllm_config: Any) -> bool:
    """Whether clients take turns by their API keys."""
    options = (vllm_config.additional_config or {}).get(KEY)
    by: str = (options or {}).get("sharing", {}).get("by", "")
    return by == "key"


def server_ttl_s(vllm_config: Any) -> float:
    """Return ``kv_tier.ttl_s``, in seconds; 0: conversations have no end, or none of our options was chosen."""
    options = (vllm_config.additional_config or {}).get(KEY)
    return parse(options).kv_tier.ttl_s if options else 0.0
