"""The store: finished requests with their embeddings, in one sqlite file that several servers may share.

Each `add` is one transaction, so that a process may be killed at any moment. What others added is found by
``id > :last``. Rows of another encoder are nobody's damage: they are left alone until they are the oldest.
"""

from __future__ import annotations

import logging
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_ext.prediction import store_file
from vllm_ext.prediction.folder import STORE, set_aside

logger = logging.getLogger("vllm_ext.predictor")

MOST_COPIES = 32
"""Entries of one text, model and salt that are kept, the newest."""
_CHUNK = 1024
_KEPT_SHARE = 0.95
"""Of the bound on its size, once it was reached: not to delete a few rows at each commit."""
_MIB = 2**20
_COLUMNS = "id, model, salt, tag, conversation, turn, prompt_tokens, tokens, aborted, vector, crc"


def digest(*parts: str) -> bytes:
    """Return the identity of a text and whatever it is of, 16 bytes; empty for an empty first part."""
    if not parts[0]:
        return b""
    whole = blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        whole.update(len(encoded).to_bytes(8, "little") + encoded)
    return whole.digest()


class NewEntry(NamedTuple):
    """A finished request to be kept."""

    text: str
    """Of which the hash is kept."""
    vector: npt.NDArray[np.float32]
    """[dim], unit length."""
    tokens: int
    model: str = ""
    salt: bytes = b""
    tag: str = ""
    conversation: bytes = b""
    turn: int = 0
    prompt_tokens: int = 0
    aborted: bool = False
    time_s: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Entries:
    """n entries, oldest first, in columns."""

    ids: npt.NDArray[np.int64]
    vectors: npt.NDArray[np.float16]
    """[n, dim]."""
    tokens: npt.NDArray[np.int64]
    prompt_tokens: npt.NDArray[np.int64]
    turns: npt.NDArray[np.int64]
    aborted: npt.NDArray[np.bool_]
    models: list[str]
    salts: list[bytes]
    tags: list[str]
    conversations: list[bytes]

    def __len__(self) -> int:
        return len(self.ids)


class Store:
    """One connection to a store's file. Used by one thread at a time."""

    def __init__(
        self, folder: Path, dim: int, *, encoder: str, capacity: int, max_mib: int, keep_prompts: bool = False
    ) -> None:
        """Open it, made if it is not there; what is damaged is set aside, and what can't be written kept in memory.

        Args:
            folder: Of the predictor.
            dim: Length of the encoder's vectors.
            encoder: Name of the encoder.
            capacity: Entries kept, at most, the newest.
            max_mib: Size of the file, at most.
            keep_prompts: Whether texts are kept as well.
        """
        self._path = folder / STORE
        self._dim, self._encoder, self._capacity = dim, encoder, capacity
        self._max_bytes, self._keep_prompts = max_mib * _MIB, keep_prompts
        self._warned: set[str] = set()
        self.opened = 0
        """Times that a file was opened: ids begin anew in another one."""
        self._open()

    def _open(self) -> None:
        self._db, self.in_memory = store_file.open_store(self._path)
        if self.in_memory:
            self._warn("memory", f"can't be written ({self.in_memory}): what is learned lasts until the process ends")
        self._file = self._inode()
        self.opened += 1

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    # --- written ----------------------------------------------------------------------------------------------------

    def add(self, entries: Sequence[NewEntry]) -> bool:
        """Insert entries in one transaction, and delete what is too much; whether they are kept.

        A full disk or a lock held for too long costs these entries, and is warned of once.
        """
        if not entries:
            return True
        try:
            with self._db:
                self._insert(entries)
            return True
        except sqlite3.Error as error:
            if self._replaced_if_damaged(error):
                return self.add(entries)
            self._warn("write", f"can't be written ({error}): learning pauses, predictions go on")
            return False

    def _insert(self, entries: Sequence[NewEntry]) -> None:
        rows, hashes = [], []
        for entry in entries:
            blob = entry.vector.astype(np.float16).tobytes()
            hashes.append(digest(entry.text or " ", entry.model, entry.salt.hex()))
            rows.append((
                hashes[-1], _text(entry.model), entry.salt, _text(entry.tag), entry.conversation, entry.turn,
                entry.prompt_tokens, entry.tokens, int(entry.aborted), entry.time_s, self._encoder, blob,
                zlib.crc32(blob), _text(entry.text) if self._keep_prompts else None,
            ))  # fmt: skip
        names = (
            "text_hash, model, salt, tag, conversation, turn, prompt_tokens, tokens, aborted, time_s, encoder, vector,"
            "crc, prompt"
        )
        self._db.executemany(f"INSERT INTO entries ({names}) VALUES ({','.join('?' * 14)})", rows)
        self._db.executemany(
            "DELETE FROM entries WHERE text_hash = ?1 AND id NOT IN "
            "(SELECT id FROM entries WHERE text_hash = ?1 ORDER BY id DESC LIMIT ?2)",
            [(each, MOST_COPIES) for each in dict.fromkeys(hashes)],
        )
        count = self._count()
        excess = count - self._capacity
        if (size := self._used_bytes()) > self._max_bytes:
            excess = max(excess, count - int(_KEPT_SHARE * count * self._max_bytes / size))
        if excess > 0:
            self._db.execute("DELETE FROM entries WHERE id IN (SELECT id FROM entries ORDER BY id LIMIT ?)", (excess,))
            self._db.execute("PRAGMA incremental_vacuum").fetchall()

    # --- read -------------------------------------------------------------------------------------------------------

    def since(self, last: int, group: tuple[str, bytes] | None = None) -> Iterator[Entries]:
        """Yield what was added after an id, by this process or another, oldest first, some at a time.

        Of one model and salt if ``group`` says so. Rows whose checksum or norm is wrong are deleted, and warned of
        once. What can't be read ends it.
        """
        where = "" if group is None else "AND model = ? AND salt = ?"
        while True:
            try:
                rows = self._db.execute(
                    f"SELECT {_COLUMNS} FROM entries WHERE id > ? AND encoder = ? {where} ORDER BY id LIMIT {_CHUNK}",
                    (last, self._encoder, *(group or ())),
                ).fetchall()
            except sqlite3.Error as error:
                if not self._replaced_if_damaged(error):
                    self._warn("read", f"can't be read ({error})")
                return
            if not rows:
                return
            last = rows[-1][0]
            if len(found := self._columns(rows)):
                yield found

    def newest(self, count: int) -> Entries:
        """Return the newest entries, oldest first, at most so many."""
        try:
            row = self._db.execute(
                "SELECT id FROM entries WHERE encoder = ? ORDER BY id DESC LIMIT 1 OFFSET ?", (self._encoder, count)
            ).fetchone()
        except sqlite3.Error:
            row = None
        return joined(list(self.since(0 if row is None else row[0])), self._dim)

    def inserted(self) -> int:
        """Return how many entries were ever inserted."""
        try:
            row = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'entries'").fetchone()
        except sqlite3.Error:
            return 0
        return 0 if row is None else int(row[0])

    def is_replaced(self) -> bool:
        """Whether the file was deleted or replaced by another process; if so the one that is there now is opened."""
        if self.in_memory or self._inode() == self._file:
            return False
        self._db.close()
        self._open()
        return True

    # --- parts ------------------------------------------------------------------------------------------------------

    def _columns(self, rows: list[tuple[object, ...]]) -> Entries:
        size = 2 * self._dim
        whole = [r for r in rows if isinstance(r[9], bytes) and len(r[9]) == size and zlib.crc32(r[9]) == r[10]]
        vectors = np.frombuffer(b"".join(r[9] for r in whole), np.float16).reshape(-1, self._dim)  # type: ignore[misc]
        tokens = np.array([r[7] if isinstance(r[7], int) else 0 for r in whole], dtype=np.int64)
        with np.errstate(invalid="ignore", over="ignore"):
            sound = (np.abs(np.linalg.norm(vectors.astype(np.float32), axis=1) - 1) < 0.05) & (tokens >= 1)
        kept = [row for row, fine in zip(whole, sound.tolist(), strict=True) if fine]
        if len(kept) < len(rows):
            ids = {row[0] for row in rows} - {row[0] for row in kept}
            self._warn("rows", f"has damaged entries: {len(ids)} deleted")
            with suppress(sqlite3.Error), self._db:
                self._db.executemany("DELETE FROM entries WHERE id = ?", [(each,) for each in ids])
        ids_, models, salts, tags, conversations, turns, prompt_tokens, _, aborted = (
            [row[column] for row in kept] for column in range(9)
        )
        return Entries(
            ids=np.array(ids_, dtype=np.int64), vectors=vectors[sound], tokens=tokens[sound],
            prompt_tokens=np.array(prompt_tokens, dtype=np.int64), turns=np.array(turns, dtype=np.int64),
            aborted=np.array(aborted, dtype=np.bool_), models=models, salts=salts, tags=tags,  # type: ignore[arg-type]
            conversations=conversations,  # type: ignore[arg-type]
        )  # fmt: skip

    def _replaced_if_damaged(self, error: sqlite3.Error) -> bool:
        """Set a damaged file aside, unless another process did, and open a new one; whether that was done."""
        if self.in_memory or not store_file.is_damage(error):
            return False
        same = self._inode() == self._file
        self._db.close()
        if same:
            with suppress(OSError):  # `open_store` finds out, and goes on in memory
                set_aside(self._path, error, logger)
        self._open()
        return True

    def _count(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM entries").fetchone()[0])

    def _used_bytes(self) -> int:
        pages, free, size = (
            int(self._db.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size

    def _inode(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _warn(self, kind: str, what: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s %s", self._path, what)


def joined(parts: Sequence[Entries], dim: int) -> Entries:
    """Return entries one after another."""
    empty = np.empty(0, np.int64)
    return Entries(
        ids=np.concatenate([empty, *(p.ids for p in parts)]),
        vectors=np.concatenate([np.empty((0, dim), np.float16), *(p.vectors for p in parts)]),
        tokens=np.concatenate([empty, *(p.tokens for p in parts)]),
        prompt_tokens=np.concatenate([empty, *(p.prompt_tokens for p in parts)]),
        turns=np.concatenate([empty, *(p.turns for p in parts)]),
        aborted=np.concatenate([np.empty(0, np.bool_), *(p.aborted for p in parts)]),
        models=[each for p in parts for each in p.models],
        salts=[each for p in parts for each in p.salts],
        tags=[each for p in parts for each in p.tags],
        conversations=[each for p in parts for each in p.conversations],
    )


def _text(text: str) -> str:
    """Return what sqlite can hold: no lone surrogates."""
    return text.encode("utf-8", "replace").decode()
