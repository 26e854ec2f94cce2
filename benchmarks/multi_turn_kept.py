"""Cells of `multi_turn.py` on disk, so that a run of hours goes on where it was interrupted.

A part of multi_turn.py: it is run from there.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_ext.observability import results
from vllm_ext.observability.files import replaced, set_aside

_logger = logging.getLogger(__name__)


class Kept:
    """A folder with one JSON file per cell, named by a digest of what was served, by what, and on which machine.

    A cell of another commit, another vLLM or another processor is not found; a damaged file is reported, set aside and
    measured again.

    Args:
        folder: Made when something is written; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._who = {"versions": results.versions(), "machine": results.machine()}
        self.taken = 0
        """Cells found, and so not measured by this run."""

    def find(self, spec: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what `keep` was given for this specification; None if there is nothing."""
        if self._folder is None:
            return None
        path = self._path(self._folder, spec)
        try:
            found = json.loads(path.read_bytes())
            if not isinstance(found, dict) or not found.keys() >= {"metrics", "settings"}:
                raise ValueError("neither metrics nor settings")
        except FileNotFoundError:
            return None
        except ValueError as damage:
            set_aside(path, damage, what="a measured cell", instead="it is measured again", logger=_logger)
            return None
        self.taken += 1
        return found

    def keep(self, spec: Mapping[str, Any], cell: Mapping[str, Any]) -> None:
        """Write a cell, whole or not at all."""
        if self._folder is None:
            return
        with replaced(self._path(self._folder, spec)) as file:
            file.write(json.dumps(cell).encode())

    def _path(self, folder: Path, spec: Mapping[str, Any]) -> Path:
        decisive = json.dumps({**self._who, "spec": spec}, sort_keys=True)
        return folder / f"{hashlib.sha256(decisive.encode()).hexdigest()[:40]}.json"
