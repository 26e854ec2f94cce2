"""The store's database file: opened for its owner only, in WAL mode, and checked; a damaged one is set aside."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path

from vllm_ext.prediction.folder import COMPANIONS, set_aside

logger = logging.getLogger("vllm_ext.predictor")

VERSION = 1
SCHEMA = f"""
PRAGMA auto_vacuum = INCREMENTAL;
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS entries (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    text_hash BLOB NOT NULL, model TEXT NOT NULL, salt BLOB NOT NULL, tag TEXT NOT NULL,
    conversation BLOB NOT NULL, turn INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
    tokens INTEGER NOT NULL, aborted INTEGER NOT NULL, time_s REAL NOT NULL,
    encoder TEXT NOT NULL, vector BLOB NOT NULL, crc INTEGER NOT NULL, prompt TEXT
);
CREATE INDEX IF NOT EXISTS by_text ON entries (text_hash);
PRAGMA user_version = {VERSION};
COMMIT;
"""
"""AUTOINCREMENT: an id is never given twice, so that others find what is new by ``id > :last``."""
_BUSY_S = 10.0
_ATTEMPTS = 20
_DAMAGED = ("malformed", "not a database", "encrypted", "unsupported file format", "integrity")
"""In sqlite's messages of a damaged file; others are of a disk, a lock or permissions."""


class DamagedError(Exception):
    """The file is no store, or not a whole one."""


def is_damage(error: Exception) -> bool:
    """Whether an error is of the file's content, and not of the place it is in."""
    return isinstance(error, DamagedError) or (
        isinstance(error, sqlite3.DatabaseError) and any(part in str(error) for part in _DAMAGED)
    )


def open_store(path: Path) -> tuple[sqlite3.Connection, str]:
    """Open a store for reading and writing; made if it is not there.

    A damaged file is set aside and replaced. Where nothing can be written or locked, what can be read is taken into
    memory, and what is learned lasts until the process ends.

    Returns:
        The connection, and why it is in memory; empty if it is not.
    """
    try:
        return _open(path), ""
    except (sqlite3.Error, OSError, DamagedError) as error:
        failed: Exception = error
    if is_damage(failed):
        try:
            set_aside(path, failed, logger)
            return _open(path), ""
        except (sqlite3.Error, OSError, DamagedError) as error:
            failed = error
    return _in_memory(path), str(failed)


def _open(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.is_dir():
        raise DamagedError("it is a folder")
    # Before sqlite opens it, which gives its other files the same permissions.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    for file in (path, *(path.with_name(path.name + companion) for companion in COMPANIONS)):
        with suppress(OSError):  # not there, or somebody else's
            if file.stat().st_mode & 0o077:
                file.chmod(0o600)
    connection = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False, isolation_level="IMMEDIATE")
    try:
        _prepare(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    check(connection)
    for attempt in range(_ATTEMPTS):
        try:
            if connection.execute("PRAGMA user_version").fetchone()[0] != VERSION:
                connection.executescript(SCHEMA)
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            break
        except sqlite3.OperationalError as error:  # two that open a new one at once; sqlite doesn't wait for this
            if "locked" not in str(error) or attempt == _ATTEMPTS - 1:
                raise
            connection.rollback()
            time.sleep(0.05)
    if mode != "wal":
        logger.warning("%s: no write-ahead log is possible here (journal %s); commits take longer", path, mode)
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA journal_size_limit = 8388608")
    connection.execute("SELECT id FROM entries LIMIT 1").fetchone()


def check(connection: sqlite3.Connection) -> None:
    """Look at every page.

    Raises:
        DamagedError: something is wrong, or the store is of another version.
        sqlite3.Error: it can't be read, or is no database.
    """
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise DamagedError(f"malformed: {found}")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if version != VERSION and (version or tables):
        raise DamagedError(f"its version is {version}, not {VERSION}")


def read_only(path: Path) -> sqlite3.Connection:
    """Open a store that is there, to look at it.

    Raises:
        FileNotFoundError: it is not there.
        sqlite3.Error, DamagedError: it can't be read.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no store")
    name = f"file:{_quoted(path)}?mode=ro"
    try:
        return _checked(sqlite3.connect(name, uri=True, timeout=_BUSY_S, check_same_thread=False))
    except sqlite3.OperationalError:  # a read-only place has no room for the log's index
        return _checked(sqlite3.connect(f"{name}&immutable=1", uri=True, check_same_thread=False))


def _checked(connection: sqlite3.Connection) -> sqlite3.Connection:
    try:
        check(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _in_memory(path: Path) -> sqlite3.Connection:
    memory = sqlite3.connect(":memory:", check_same_thread=False, isolation_level="IMMEDIATE")
    try:
        with closing(read_only(path)) as there:
            there.backup(memory)
    except (OSError, sqlite3.Error, DamagedError):
        memory.close()
        memory = sqlite3.connect(":memory:", check_same_thread=False, isolation_level="IMMEDIATE")
    if memory.execute("PRAGMA user_version").fetchone()[0] != VERSION:
        memory.executescript(SCHEMA)
    return memory


def _quoted(path: Path) -> str:
    from urllib.parse import quote

    return quote(str(path.absolute()), errors="surrogateescape")
