"""The environment variables of vllm-ext: the one file that reads them.

They exist for what must hold with any scheduler, upstream's included, where no option of ours reaches the process, and
for keys, which would be seen in a command line and in logs. They are read when asked for, so that a test or a parent
process may set them late. A value that is not allowed is an error, never a default.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

BENCH_FORCED_LENGTH = "VLLM_EXT_BENCH_FORCED_LENGTH"
"""``1``: the engine core ends a request after ``bench_output_len`` tokens (benchmarks and tests only)."""

BENCH_STEP_RECORD = "VLLM_EXT_BENCH_STEP_RECORD"
"""``1``: the engine core records what its scheduler is told and decides (benchmarks and tests only)."""

ADMIN_KEY = "VLLM_EXT_ADMIN_KEY"
"""Key of the admin endpoint, without which that does not open."""

LEAST_KEY_CHARS = 16

PREDICTOR = "VLLM_EXT_PREDICTOR"
"""Set by a server for its API servers, not by users: the random name of the predictor that they share."""

COLOCATED_PREDICTOR = "VLLM_EXT_COLOCATED_PREDICTOR"
"""Set by ``vllm-ext cluster`` for its replicas: the name of the predictor that those of one machine share."""

REPORT_S, HANG_S = "VLLM_EXT_REPORT_S", "VLLM_EXT_HANG_S"
"""Set by ``vllm-ext cluster`` for its replicas: seconds between reports, and without a step until one has hung."""

COMMIT = "VLLM_EXT_COMMIT"
"""The commit that results are of, where sources run without their repository (benchmarks only)."""

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


def colocated_predictor() -> str:
    """Return the name of the predictor that the engines of this machine share; empty: each has its own.

    Raises:
        ValueError: it is no name.
    """
    name = os.environ.get(COLOCATED_PREDICTOR, "")
    if not (name.isascii() and name.isalnum() and len(name) <= 64) and name:
        raise ValueError(f"{COLOCATED_PREDICTOR}={name!r}: must be up to 64 letters and digits")
    return name


def report_s() -> float:
    """Return the seconds between a replica's reports. Raises ValueError if they are no number above 0."""
    return _seconds(REPORT_S, 0.5)


def hang_s() -> float:
    """Return the seconds after which a replica without a step has hung. Raises ValueError as `report_s` does."""
    return _seconds(HANG_S, 60.0)


def _seconds(name: str, usual: float) -> float:
    text = os.environ.get(name)
    try:
        found = usual if text is None else float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise ValueError(f"{name}={text!r}: must be a number of seconds greater than 0")
    return found


def commit() -> str:
    """Return the commit that these sources are said to be of; empty: the repository is to be asked."""
    return os.environ.get(COMMIT, "")


def share_predictor() -> None:
    """Name a predictor for the processes that this one will start; never one that this process was told of."""
    os.environ[PREDICTOR] = secrets.token_hex(8)


def shared_predictor() -> str:
    """Return the name of the predictor that the API servers of one server share; empty if there is none."""
    return os.environ.get(PREDICTOR, "")


def admin_key() -> str:
    """Return the key of the admin endpoint.

    Raises:
        ValueError: The variable is unset, too short, or holds what no header carries; the key is not shown.
    """
    key = os.environ.get(ADMIN_KEY, "")
    if len(key) >= LEAST_KEY_CHARS and key.isascii() and key.isprintable() and " " not in key:
        return key
    found = f"has {len(key)} characters" if key else "is not set"
    raise ValueError(
        f"{ADMIN_KEY} {found}: the admin endpoint needs a key of its own there, of at least {LEAST_KEY_CHARS} "
        "printable ASCII characters without blanks; set it, or leave out --ext-admin and --kv-tier-admin"
    )


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
