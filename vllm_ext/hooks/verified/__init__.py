"""Fingerprints of the functions of vLLM that were read, in a file for each version: ``{target: fingerprint}``.

``python -m vllm_ext.hooks --source SOURCE --write VERSION`` writes one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib.resources import files

from vllm_ext.hooks.versions import SUPPORTED


@functools.cache
def of_version(version: str) -> Mapping[str, str]:
    """Return the fingerprints of a version, by target; none if it was not read."""
    file = files(__name__).joinpath(f"{version}.json")
    found: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def of_target(target: str) -> dict[str, str]:
    """Return a function's fingerprints by supported version, where it is there."""
    return {version: known[target] for version in SUPPORTED if target in (known := of_version(version))}
