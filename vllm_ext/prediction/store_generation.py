"""The files of one state of a vector store: written, checked, read. What a folder holds is told in `store_files`."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from vllm_ext.observability.files import replaced
from vllm_ext.prediction.store_access import FILE_MODE, FOLDER_MODE, alone, hide, private, unsaved
from vllm_ext.prediction.store_rows import Entries

logger = logging.getLogger(__name__)

FORMAT = "vllm-ext vector store 1"
CURRENT = "CURRENT"
_METADATA, _ENTRIES, _PROMPTS = "metadata.json", "entries.npz", "prompts.json"
_GENERATION = re.compile(r"gen-(\d{6,18})-[0-9a-f]{8}")
_ARRAYS = ("vectors", "lengths", "times_s", "model_codes", "prompt_tokens")
_FIELDS = {"encoder": str, "dim": int, "entries": int, "models": list, "sha256": dict}
_NO_ARCHIVE = (TypeError, ValueError, KeyError, EOFError, RuntimeError, OSError, zipfile.BadZipFile, zlib.error)
"""What numpy and zipfile raise for a file that is no archive of arrays, though its checksum is right."""
_CHUNK_BYTES = 2**20


def write(folder: Path, entries: Entries, encoder: str) -> None:
    """Write a new generation and make it the current one; the generations before go.

    Another saver of the same folder is waited for. What a killed saver left goes with the next one that ends well. But
    what may have been the current generation is kept, as ``gen-...lost``, where no readable CURRENT says otherwise.

    Raises:
        OSError: it can't be written; the state before still counts.
    """
    with alone(folder):
        _keep_lost(folder)
        if os.path.lexists(folder / CURRENT):  # a store's own folder, and not a place that others use as well
            hide(folder)
        numbers = [int(match[1]) for path in folder.iterdir() if (match := _GENERATION.fullmatch(path.name))]
        generation = folder / f"gen-{max(numbers, default=0) + 1:06}-{secrets.token_hex(4)}"
        generation.mkdir(FOLDER_MODE)
        try:
            digest = _write_files(generation, entries, encoder)
            _sync_folder(folder)
            current = {"format": FORMAT, "generation": generation.name, "metadata_sha256": digest}
            with replaced(folder / CURRENT) as file:
                with contextlib.suppress(PermissionError):  # a file system without permissions
                    os.fchmod(file.fileno(), FILE_MODE)
                file.write(json.dumps(current).encode())
                _sync(file)
        except BaseException:
            if generation.name.encode() not in _bytes_of(folder / CURRENT):
                shutil.rmtree(generation, ignore_errors=True)
            raise
        _sync_folder(folder)
        _remove_others(folder, generation.name)


def read(folder: Path, *, in_alone: bool = False) -> tuple[Entries, dict[str, Any]]:
    """Read the current generation; nothing is changed on disk.

    Args:
        folder: Of the store.
        in_alone: Whether the caller is within `alone`.

    Returns:
        Entries, oldest insertion first, and the metadata (encoder, dim, entries, models, sha256).

    Raises:
        FileNotFoundError: no state was ever saved in this folder.
        ValueError: it is damaged or of another format; the message names the file and what is wrong.
        OSError: it can't be read.
    """
    while True:
        try:
            current = _current(folder)
        except FileNotFoundError:
            if not (lost := _complete(folder)):
                raise
            if not in_alone:  # the first save may be about to write CURRENT
                with unsaved(folder):
                    return read(folder, in_alone=True)
            raise ValueError(f"{folder / CURRENT}: missing, though {lost[-1].name} is there") from None
        try:
            return _read_files(folder / current["generation"], current["metadata_sha256"])
        except (IsADirectoryError, NotADirectoryError) as error:
            raise ValueError(
                f"{error.filename}: damaged, a folder where a file must be, or a file where a folder must be"
            ) from error
        except FileNotFoundError as error:
            if _current(folder) == current:
                raise ValueError(f"{error.filename}: missing, but {CURRENT} names it") from error
            # a newer state took its place while we read


def _current(folder: Path) -> dict[str, Any]:
    path = folder / CURRENT
    try:
        raw = path.read_bytes()
    except (NotADirectoryError, IsADirectoryError) as error:
        raise ValueError(f"{path}: damaged, {folder.name} must be a folder and {CURRENT} a file") from error
    current = _document(path, raw)
    generation, digest = current.get("generation"), current.get("metadata_sha256")
    if not isinstance(generation, str) or not _GENERATION.fullmatch(generation):
        raise ValueError(f"{path}: generation={generation!r}: must be a name like gen-000001-0a1b2c3d")
    if not isinstance(digest, str):
        raise ValueError(f"{path}: metadata_sha256={digest!r}: must be a text")
    return current


def _write_files(folder: Path, entries: Entries, encoder: str) -> str:
    """Write the files of one generation and return the SHA-256 of its metadata."""
    names = sorted(set(entries.models))
    codes = {name: code for code, name in enumerate(names)}
    arrays: dict[str, Any] = {  # of numbers only, so that nothing is pickled
        "vectors": entries.vectors,
        "lengths": entries.lengths,
        "times_s": entries.times_s,
        "model_codes": np.array([codes[name] for name in entries.models], np.int32),
        "prompt_tokens": entries.prompt_tokens,
    }
    sums = {_ENTRIES: _write_file(folder / _ENTRIES, lambda file: np.savez(file, **arrays))}
    if entries.prompts is not None:
        texts = json.dumps(entries.prompts).encode()
        sums[_PROMPTS] = _write_file(folder / _PROMPTS, lambda file: file.write(texts))
    metadata = {
        "format": FORMAT,
        "encoder": encoder,
        "dim": entries.vectors.shape[1],
        "entries": len(entries),
        "models": names,
        "sha256": sums,
    }
    document = json.dumps(metadata, indent=1).encode()
    digest = _write_file(folder / _METADATA, lambda file: file.write(document))
    _sync_folder(folder)
    return digest


def _read_files(folder: Path, metadata_sha256: str) -> tuple[Entries, dict[str, Any]]:
    metadata = _metadata(folder / _METADATA, metadata_sha256)
    path = folder / _ENTRIES
    with path.open("rb") as file:
        _check_sum(path, file, metadata["sha256"].get(_ENTRIES))
        try:
            with np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in _ARRAYS}
        except _NO_ARCHIVE as error:
            if isinstance(error, OSError) and error.errno != errno.EINVAL:  # but that's an offset that can't be
                raise
            raise ValueError(f"{path}: damaged, lacks or has a wrong array ({error})") from error
    prompts = None
    if _PROMPTS in metadata["sha256"]:
        with (folder / _PROMPTS).open("rb") as file:
            _check_sum(folder / _PROMPTS, file, metadata["sha256"][_PROMPTS])
            prompts = _json(folder / _PROMPTS, file.read())
    codes, names = arrays["model_codes"], metadata["models"]
    try:
        if not len(arrays["lengths"]) == len(codes) == metadata["entries"]:
            raise ValueError(
                f"entries={metadata['entries']}: the arrays hold {len(arrays['lengths'])} and {len(codes)}"
            )
        if len(codes) and not (codes.dtype == np.int32 and 0 <= codes.min() <= codes.max() < len(names)):
            raise ValueError(f"model_codes: must be the numbers of {len(names)} names")
        models = [names[code] for code in codes.tolist()]
        return Entries.checked(
            metadata["dim"],
            arrays["vectors"],
            arrays["lengths"],
            models,
            arrays["times_s"],
            prompts,
            arrays["prompt_tokens"],
        ), metadata
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: {error}") from error


def _metadata(path: Path, sha256: str) -> dict[str, Any]:
    with path.open("rb") as file:
        _check_sum(path, file, sha256)
        metadata = _document(path, file.read())
    for field, kind in _FIELDS.items():
        if not isinstance(metadata.get(field), kind):
            raise ValueError(f"{path}: {field}={metadata.get(field)!r}: must be of type {kind.__name__}")
    if metadata["dim"] < 1:
        raise ValueError(f"{path}: dim={metadata['dim']!r}: must be at least 1")
    return metadata


def _document(path: Path, raw: bytes) -> dict[str, Any]:
    document = _json(path, raw)
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path}: format={found!r}: must be {FORMAT!r}")
    return dict(document)


def _json(path: Path, raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged, not a JSON file ({error})") from error


def _check_sum(path: Path, file: IO[bytes], sha256: object) -> None:
    """Compare a whole file with its checksum, and go back to its start."""
    if _digest(file) != sha256:
        raise ValueError(f"{path}: damaged, its SHA-256 is not {sha256!r}")
    file.seek(0)


def _digest(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def _write_file(path: Path, content: Callable[[IO[bytes]], object]) -> str:
    """Write a new file, its owner's only, through to the disk and return its SHA-256."""
    with open(path, "xb+", opener=private) as file:
        content(file)
        _sync(file)
        file.seek(0)
        return _digest(file)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Names are on the disk only when their folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _complete(folder: Path) -> list[Path]:
    """Generations whose metadata is there, which is written last, in the order in which they were begun."""
    found = [path for path in folder.glob("gen-*") if _GENERATION.fullmatch(path.name) and (path / _METADATA).exists()]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def _keep_lost(folder: Path) -> None:
    """Put out of the way what may be all there is: generations that no readable CURRENT declares old."""
    try:
        if (folder / _current(folder)["generation"]).exists():
            return
    except (FileNotFoundError, ValueError):
        pass
    for path in _complete(folder):
        kept = path.rename(path.with_name(f"{path.name}.lost"))
        logger.warning("%s: missing or damaged; what it may have named is kept as %s", folder / CURRENT, kept.name)


def _remove_others(folder: Path, kept: str) -> None:
    for path in folder.iterdir():
        if _GENERATION.fullmatch(path.name) and path.name != kept:
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(f".{CURRENT}.") and path.name.endswith(".tmp"):
            path.unlink(missing_ok=True)
