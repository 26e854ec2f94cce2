"""A store and its folder, which other servers of the same model may write to as well."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_ext.prediction import store_files
from vllm_ext.prediction.store_generation import CURRENT
from vllm_ext.prediction.store_rows import Entries
from vllm_ext.prediction.vector_store import VectorStore

logger = logging.getLogger(__name__)


class SharedStore:
    """Keeps a store in a folder, and takes over what others saved there since.

    Each server saves everything it knows; the last one to save would undo what the others learned. So before a save
    the folder's state, if it is not the one saved last by this process, is read and what is new in it is added. Two
    servers that save at the very same moment can still miss each other's last interval until the next save: nothing is
    lost for good, as each has its own entries in memory.
    """

    def __init__(self, store: VectorStore, folder: Path, *, max_bytes: int) -> None:
        self.store = store
        self._folder = folder
        self._max_bytes = max_bytes
        self._changed = False
        self._state = self._current()

    def add(
        self,
        vectors: NDArray[np.float32],
        lengths: NDArray[np.int64],
        models: Sequence[str],
        times_s: NDArray[np.float64],
        *,
        prompts: Sequence[str] | None = None,
    ) -> None:
        """Insert entries; arguments as of `VectorStore.add`."""
        self.store.add(vectors, lengths, models, times_s, prompts=prompts)
        self._changed = True

    def save(self) -> None:
        """Write the store if anything was learned since the last save, and take over what others saved.

        Raises:
            OSError: it can't be written; the next save tries again.
        """
        self._absorb()
        if not self._changed:
            return
        store_files.save(self.store, self._folder, max_bytes=self._max_bytes)
        self._changed = False
        self._state = self._current()

    def _absorb(self) -> None:
        state = self._current()
        if state == self._state or state is None:
            return
        try:
            theirs, metadata = store_files.read(self._folder)
        except (OSError, ValueError) as error:
            logger.warning("what another server saved in %s can't be read (%s) and is replaced", self._folder, error)
            self._changed = True
            return
        self._state = state
        if metadata["encoder"] != self.store.encoder or metadata["dim"] != self.store.dim:
            logger.warning(
                "another server with the encoder %s saves in %s too; give each a folder of its own",
                metadata["encoder"],
                self._folder,
            )
            return
        have = set(_keys(self.store.entries()))
        new = [row for row, key in enumerate(_keys(theirs)) if key not in have]
        if new:
            fresh = theirs.take(np.array(new, dtype=np.intp))
            self.add(fresh.vectors, fresh.lengths, fresh.models, fresh.times_s, prompts=fresh.prompts)

    def _current(self) -> bytes | None:
        """What tells one state of the folder from another; None while there is none."""
        try:
            return (self._folder / CURRENT).read_bytes()
        except OSError:
            return None


def _keys(entries: Entries) -> list[tuple[bytes, Any, Any]]:
    """What makes two entries the same observation, as for `store_files.merge`."""
    digests = (hashlib.blake2b(vector.tobytes(), digest_size=16).digest() for vector in entries.vectors)
    return list(zip(digests, entries.lengths.tolist(), entries.times_s.tolist(), strict=True))
