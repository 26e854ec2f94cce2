"""A predictor's folder: what length prediction learned of one served model.

<folder>/lengths.sqlite          finished requests: embedding, output length and what else is known (`store`)
<folder>/regression.safetensors  fitted to them (`regression`); missing until there are enough
<folder>/*.damaged-<n>           what was found damaged and set aside, three of each at most
"""

from __future__ import annotations

import hashlib
import logging
import re
from pathlib import Path

from vllm_ext.envs import cache_dir

STORE = "lengths.sqlite"
REGRESSION = "regression.safetensors"
COMPANIONS = ("-wal", "-shm", "-journal")
"""What sqlite keeps beside a database."""
_LONGEST_SLUG = 120
_MOST_ASIDE = 3


def default_folder(model: str) -> Path:
    """Return where the predictor of a served model is kept: a folder of its own in the cache. It need not exist.

    Args:
        model: Name of the served model: an id on the hub, or a path. Different names give different folders.

    Raises:
        ValueError: the name is empty or blank.
    """
    if not model.strip():
        raise ValueError(f"model={model!r}: must be the name of the served model")
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-.")[-_LONGEST_SLUG:]
    # The slug alone would be the same for "a/b" and "a-b".
    digest = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return cache_dir() / "predictors" / f"{slug or 'model'}-{digest}"


def set_aside(path: Path, damage: Exception, logger: logging.Logger) -> None:
    """Rename a damaged file, with sqlite's beside it, to ``<name>.damaged-<n>``, and warn; three are kept, newest last.

    Raises:
        OSError: it can't be renamed: a read-only place.
    """
    free = next((n for n in range(1, _MOST_ASIDE + 1) if not aside(path, n).exists()), None)
    if free is None:
        for n in range(1, _MOST_ASIDE):
            aside(path, n + 1).replace(aside(path, n))
        free = _MOST_ASIDE
    for companion in COMPANIONS:  # of no use without the file, and of harm beside the next one
        path.with_name(path.name + companion).unlink(missing_ok=True)
    path.replace(aside(path, free))
    logger.warning("%s is damaged (%s): set aside as %s; learning starts anew", path, damage, aside(path, free).name)


def aside(path: Path, n: int) -> Path:
    """Return the name of the n-th damaged file."""
    return path.with_name(f"{path.name}.damaged-{n}")


def clear(folder: Path) -> int:
    """Delete what a folder holds of a predictor, and the folder if nothing else is in it; returns the files deleted."""
    files = [file for name in (STORE, REGRESSION) for file in folder.glob(f"{name}*") if file.is_file()]
    for file in files:
        file.unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    return len(files)
