"""What a start measured of both attention kernels, kept in the cache folder: later starts choose the same kernels.

Times vary, so that two measurements may choose differently, and other kernels give other output bits. A file is JSON,
and whole or not there. It says what it was measured with, and has a digest of that in its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from vllm_ext import envs
from vllm_ext.attention.plan import Kind
from vllm_ext.files import replaced, set_aside
from vllm_ext.kernels.native import locked

logger = logging.getLogger("vllm.vllm_ext")
_NOT_KEPT = "what was measured of attention kernels is not kept for later starts: %s"


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """Time of our kernel over that of vLLM's, by kind of step."""

    by_kind: Mapping[Kind, float]
    kept_from: date | None = None
    """Day (UTC) of the start that measured them; None: this one did."""


def kept_or_measured(key: Mapping[str, str], measure: Callable[[], Mapping[Kind, float]]) -> Ratios:
    """Return what an earlier start measured; if none did, measure now and keep it.

    Processes of one server wait for the one that measures. A damaged file is set aside. Where nothing can be written,
    every start measures.

    Args:
        key: What the ratios depend on.
        measure: Returns the ratio of each kind.
    """
    try:
        path = path_of(key)
    except RuntimeError as error:  # the user has no home
        logger.warning(_NOT_KEPT, error)
        return Ratios(by_kind=measure())
    with _lock_of(path):
        if (kept := _kept(path, key)) is not None:
            return kept
        measured = Ratios(by_kind=measure())
        _keep(path, key, measured)
        return measured


def path_of(key: Mapping[str, str]) -> Path:
    """Return the file of ratios that depend on ``key``; it need not exist.

    Raises:
        RuntimeError: there is no cache folder, as the user has no home.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return envs.cache_dir() / "attention" / f"ratios-{digest}.json"


@contextlib.contextmanager
def _lock_of(path: Path) -> Iterator[None]:
    """Hold a file's lock; where none can be made, nobody can write either."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(path.with_suffix(".lock")))
        yield


def _kept(path: Path, key: Mapping[str, str]) -> Ratios | None:
    try:
        return _parsed(path.read_text(encoding="utf-8"), key)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("attention: kernel timings of an earlier start are ignored: %s", error)
    except ValueError as error:
        set_aside(path, error, what=str(path), instead="attention kernels are measured again", logger=logger)
    return None


def _parsed(text: str, key: Mapping[str, str]) -> Ratios:
    """Read the content of a file.

    Raises:
        ValueError: it is damaged, or was measured with something else.
    """
    found: Any = json.loads(text)
    try:
        ratios = {Kind[name]: float(ratio) for name, ratio in found["ratios"].items()}
        day = date.fromisoformat(found["measured"])
        is_ours = found["key"] == key
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"lacks or has a wrong field: {error!r}") from error
    if not is_ours:
        raise ValueError(f"key={found['key']!r}: must be {dict(key)!r}")
    if set(ratios) != set(Kind) or not all(0 < ratio < math.inf for ratio in ratios.values()):
        raise ValueError(f"ratios={found['ratios']!r}: must be positive numbers for {', '.join(Kind.__members__)}")
    return Ratios(by_kind=ratios, kept_from=day)


def _keep(path: Path, key: Mapping[str, str], measured: Ratios) -> None:
    ratios = {kind.name: ratio for kind, ratio in measured.by_kind.items()}
    content = {"measured": datetime.now(UTC).date().isoformat(), "key": dict(key), "ratios": ratios}
    try:
        with replaced(path) as file:
            file.write(json.dumps(content, indent=1, allow_nan=False).encode())
    except OSError as error:
        logger.warning(_NOT_KEPT, error)
