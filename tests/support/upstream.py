"""Which hooks the vLLM installed is not for: tests of what needs them are skipped there, and nowhere else."""

from __future__ import annotations

import pytest

from vllm_ext.hooks import registry, versions
from vllm_ext.hooks.errors import installed_vllm
from vllm_ext.hooks.patch import Addition, Hook

INSTALLED = installed_vllm().partition("+")[0]
WITHOUT: dict[str, set[str]] = {
    "0.31.0": {"KV in 8 bits on the device", "KV tier on disk", "gaps in kept KV in one step"},
    "0.32.0": set(),
    "0.33.0": {"KV in 8 bits on the device", "attention"},
}
"""Features that can't be had with a version."""

WITH_RAY = pytest.mark.skipif(INSTALLED == "0.33.0", reason="Ray 2.60 imports what vLLM 0.33 does not have")


def is_for_installed(hook: Hook) -> bool:
    """Whether a hook should fit: it does not say that it is for others of the supported versions."""
    return isinstance(hook, Addition) or INSTALLED in hook.versions or INSTALLED not in versions.SUPPORTED


def lacking(*groups: str) -> list[str]:
    """Which groups of hooks are not for the vLLM installed, though it is a supported one."""
    return [name for name in groups if not all(map(is_for_installed, registry.group(name)))]


def needs(*groups: str) -> pytest.MarkDecorator:
    """Skip where a group of hooks is `lacking`."""
    without = lacking(*groups)
    return pytest.mark.skipif(bool(without), reason=f"{', '.join(without)} can't be had with vLLM {INSTALLED}")


WITH_GAPS = needs("kv-gaps-fused", "kv-gaps-v1", "kv-gaps-v2")
