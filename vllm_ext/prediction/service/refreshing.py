"""Training of the decoder while serving: a process of the lowest priority, started from time to time."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

FIRST_AT = 200
"""Entries at which the decoder is trained for the first time."""
_GROWTH = 1.5
_MAX_MISSED = 10_000
"""Entries inserted since the last training after which it is due, however large the store is."""
NOT_BETTER = 3
"""Exit status of a training that gave nothing to use."""


class DecoderRefresh:
    """Trains from the store's files, in a process of its own: it takes minutes, and may fail, without harm.

    The first training is due at `FIRST_AT` entries, a further one when half as many again, or 10,000, were inserted. A
    full store has its old entries replaced and does not grow: insertions are counted, not entries.
    """

    def __init__(self, folder: Path, *, seed: int) -> None:
        self._folder = folder
        self._seed = seed
        self._process: subprocess.Popen[bytes] | None = None
        self._tried_at = 0
        self._failed = False

    def start_if_due(self, inserted: int, trained_on: int) -> None:
        """Start a training if the store (so many were ever inserted) has outgrown the decoder (trained on so many)."""
        if self._process is not None or not self._due(inserted, max(trained_on, self._tried_at)):
            return
        self._tried_at = inserted
        command = [sys.executable, "-m", "vllm_ext.prediction.refresh", str(self._folder), "--seed", str(self._seed)]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        except OSError as error:
            self._warn(f"can't be started ({error})")

    def finished(self) -> bool:
        """Whether a training ended with a new decoder since this was asked last."""
        if self._process is None or self._process.poll() is None:
            return False
        status, self._process = self._process.returncode, None
        if status not in (0, NOT_BETTER):
            self._warn(f"ended with status {status}")
        return status == 0

    def stop(self) -> None:
        """End a training that runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @staticmethod
    def _due(inserted: int, trained_on: int) -> bool:
        if trained_on == 0:
            return inserted >= FIRST_AT
        return inserted >= min(_GROWTH * trained_on, trained_on + _MAX_MISSED)

    def _warn(self, what: str) -> None:
        if not self._failed:
            self._failed = True
            logger.warning("the training of the length decoder %s; predictions go on without a newer one", what)
