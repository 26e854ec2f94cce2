"""Where built models are kept: one directory per (style, seed, format), complete or absent, with checksums."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

MANIFEST = "MANIFEST.json"
"""Written last: the name and SHA-256 of every other file."""


def obtain(target: Path, make: Callable[[Path], None]) -> Path:
    """Return `target`, filled by `make` unless a complete copy is there already.

    A directory that misses a file or fails a checksum is reported on stderr, set aside under a new name beside
    `target` and built again. Several processes may call this at once: each builds its own copy, the first one to
    finish puts it in place and the others discard theirs.

    Raises:
        OSError: The parent directory cannot be written.
    """
    if target.exists():
        fault = damage(target)
        if fault is None:
            return target
        print(f"vllm-ext: tiny model in {target} is damaged ({fault}); set aside and built again", file=sys.stderr)
        _set_aside(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        fresh = Path(scratch) / "model"
        fresh.mkdir()
        make(fresh)
        _write_manifest(fresh)
        try:
            os.replace(fresh, target)
        except OSError:
            # another process was faster; anything else that stands in the way is an error for the caller
            if damage(target) is not None:
                raise
    return target


def damage(directory: Path) -> str | None:
    """Return what is wrong with a built model, or None when every file is as it was written."""
    try:
        expected = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["sha256"]
        for name, digest in sorted(expected.items()):
            if _sha256(directory / name) != digest:
                return f"{name} has changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} or a file it lists cannot be read: {error}"
    return None


def _set_aside(target: Path) -> None:
    for number in range(1, 1000):
        aside = target.with_name(f"{target.name}.damaged-{number}")
        if aside.exists():
            continue
        try:
            os.replace(target, aside)
        except FileNotFoundError:
            return  # another process has just set it aside
        return
    raise OSError(f"{target}: too many damaged copies beside it; delete {target.name}.damaged-*")


def _write_manifest(directory: Path) -> None:
    digests = {path.name: _sha256(path) for path in sorted(directory.iterdir())}
    (directory / MANIFEST).write_text(json.dumps({"sha256": digests}, indent=2) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
