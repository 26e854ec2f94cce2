"""What a command needs and may not find: told in one line, with what to install."""

from __future__ import annotations

import importlib.util

INSTALL = "run `make setup`, or pip install 'vllm-ext[cpu]', with a GPU 'vllm-ext[cuda]'"
"""What to do where something is missing that most of the package needs."""


def need(module: str) -> None:
    """Raise ModuleNotFoundError if a module is not installed, before work is begun that each fails without it."""
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def told(error: ModuleNotFoundError) -> str:
    """Return the line for what is not installed.

    Raises:
        ModuleNotFoundError: It is a part of this package.
    """
    missing = (error.name or "").partition(".")[0]
    if missing in ("", "vllm_ext"):
        raise error
    return f"needs {missing}, which is not installed: {INSTALL}"
