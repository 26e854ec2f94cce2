"""The environment variables of vllm-ext: the one file that reads them.

They exist only for what must hold with any scheduler, upstream's included, where no option of ours reaches the process.
They are read when asked for, so that a test or a parent process may set them late. A value that is not allowed is an
error, never a default.
"""

from __future__ import annotations

import os
from pathlib import Path

BENCH_FORCED_LENGTH = "VLLM_EXT_BENCH_FORCED_LENGTH"
"""``1``: the engine core ends a request after ``bench_output_len`` tokens (benchmarks and tests only)."""

BENCH_STEP_RECORD = "VLLM_EXT_BENCH_STEP_RECORD"
"""``1``: the engine core records what its scheduler is told and decides (benchmarks and tests only)."""

CACHE = "VLLM_EXT_CACHE"
"""Folder for files that can be made again, such as the tiny model; by default ``vllm-ext`` in the user's cache."""


def cache_dir() -> Path:
    """Return the folder for files that can be made again: ``VLLM_EXT_CACHE``, else ``vllm-ext`` in the user's cache.

    The user's cache is ``XDG_CACHE_HOME``, else ``~/.cache``. The folder need not exist.
    """
    if own := os.environ.get(CACHE):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "vllm-ext"
    return Path.home() / ".cache" / "vllm-ext"


def bench_forced_length() -> bool:
    """Whether requests may carry their true output length for benchmarks.

    Raises:
        ValueError: The variable is neither ``0`` nor ``1``.
    """
    return _flag(BENCH_FORCED_LENGTH)


def bench_step_record() -> bool:
    """Whether the engine core records its steps for benchmarks.

    Raises:
        ValueError: The variable is neither ``0`` nor ``1``.
    """
    return _flag(BENCH_STEP_RECORD)


def _flag(name: str) -> bool:
    value = os.environ.get(name, "")
    if value in ("", "0"):
        return False
    if value == "1":
        return True
    raise ValueError(f"{name}={value!r}: must be 0 or 1; unset it to switch it off")
