"""A store and its folder, which other servers of the same model may write to as well."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_ext.prediction import store_files
from vllm_ext.prediction.store_generation import CURRENT
from vllm_ext.prediction.vector_store import VectorStore

logger = logging.getLogger(__name__)


class SharedStore:
    """Keeps a store in a folder, and takes over what others saved there since.

    Each server saves everything it knows; the last one to save would undo what the others learned. So before a save
    the folder's state, if it is not the one saved last by this process, is read and what is new in it is added, while a
    lock keeps the others from saving.
    """

    def __init__(self, store: VectorStore, folder: Path, *, max_bytes: int, state: bytes | None = None) -> None:
        """Take a store and the folder it was read from.

        Args:
            store: What is known.
            folder: Where it is kept; need not exist.
            max_bytes: As of `store_files.save`.
            state: `current_state` before the store was read; None for that of now.
        """
        self.store = store
        self._folder = folder
        self._max_bytes = max_bytes
        self._changed = False
        self._foreign = False
        self._seen: set[bytes] = set()
        self._state = self._current() if state is None else state
        self.inserted = len(store)
        """Entries ever put into the store: more than it holds where old ones had to go."""

    def add(
        self,
        vectors: NDArray[np.float32],
        lengths: NDArray[np.int64],
        models: Sequence[str],
        times_s: NDArray[np.float64],
        *,
        prompts: Sequence[str] | None = None,
        prompt_tokens: Sequence[int] = (),
    ) -> None:
        """Insert entries; arguments as of `VectorStore.add`."""
        self.store.add(vectors, lengths, models, times_s, prompts=prompts, prompt_tokens=prompt_tokens)
        self.inserted += len(lengths)
        self._changed = True

    def save(self) -> None:
        """Write the store if anything was learned since the last save, and take over what others saved.

        Raises:
            OSError: it can't be written; the next save tries again.
        """
        if not self._changed and self._current() in (None, self._state):
            return
        with self._alone():
            self._absorb()
            if self._changed:
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
            if not self._foreign:
                self._foreign = True
                logger.warning(
                    "another server with the encoder %s saves in %s too; give each a folder of its own",
                    metadata["encoder"],
                    self._folder,
                )
            return
        keys = theirs.keys()
        have = set(self.store.entries().keys())
        # What was seen there before and is not in our store was dropped for its age: two full stores would else hand
        # old entries back to each other for ever.
        new = [row for row, key in enumerate(keys) if key not in have and key not in self._seen]
        self._seen = have.union(keys)
        if new:
            # At their place in time: old entries of theirs must not drive out newer ones of ours.
            taken = self.store.absorb(theirs.take(np.array(new, dtype=np.intp)))
            self.inserted += taken
            self._changed = self._changed or taken > 0

    def _current(self) -> bytes | None:
        return current_state(self._folder)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no other server saves; the system frees the lock of one that was killed."""
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        with (self._folder.parent / f".{self._folder.name}.lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def current_state(folder: Path) -> bytes | None:
    """Return what tells one state of a store's folder from another; None while there is none."""
    try:
        return (folder / CURRENT).read_bytes()
    except OSError:
        return None
