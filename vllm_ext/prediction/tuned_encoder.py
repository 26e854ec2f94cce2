"""The tuned encoder in a predictor's folder: a sentence-transformers model with a note of how it was made.

    <folder>/encoder/               weights, tokenizer and configuration
    <folder>/encoder/tuning.json    format, report, SHA-256 of every other file

It is written under another name and renamed when it is complete. A server whose options name no encoder uses it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from vllm_ext.observability.files import remove_leftovers, set_aside, sha256_of
from vllm_ext.prediction.encoder_tuning import EncoderReport, TunedModel

logger = logging.getLogger(__name__)

ENCODER = "encoder"
NOTE = "tuning.json"
FORMAT = "vllm-ext tuned encoder 1"


def write(tuned: TunedModel, folder: Path) -> Path:
    """Write near to where it belongs, for `install`; return the encoder's folder.

    Args:
        tuned: The encoder.
        folder: The predictor's folder; made if it is not there.

    Raises:
        OSError: it can't be written; nothing is left of it.
    """
    fresh = _near(folder)
    try:
        tuned.model.save_encoder(fresh)
        note = {"format": FORMAT, "report": asdict(tuned.report), "sha256": _checksums(fresh)}
        (fresh / NOTE).write_text(json.dumps(note, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        fresh.chmod(0o700)  # its owner's only, as the store is
    except BaseException:
        discard(fresh)
        raise
    return fresh


def install(fresh: Path | None, folder: Path) -> None:
    """Put what `write` or `copy` returned in its place; None removes the encoder that is there.

    Raises:
        OSError: it can't be renamed.
    """
    place = folder / ENCODER
    if os.path.lexists(place):
        old = _near(folder)
        place.rename(old)
        shutil.rmtree(old.parent, ignore_errors=True)
    if fresh is not None:
        fresh.rename(place)
        shutil.rmtree(fresh.parent, ignore_errors=True)


def discard(fresh: Path | None) -> None:
    """Remove what `write` or `copy` returned, if it is still there, and the predictor's folder if nothing is in it."""
    if fresh is not None:
        shutil.rmtree(fresh.parent, ignore_errors=True)
        with contextlib.suppress(OSError):
            fresh.parent.parent.rmdir()


def copy(source: Path, folder: Path) -> Path:
    """Copy the tuned encoder of one predictor's folder near to where another's belongs, for `install`.

    Raises:
        OSError: it can't be read or written.
    """
    fresh = _near(folder)
    try:
        shutil.copytree(source / ENCODER, fresh)
    except BaseException:
        discard(fresh)
        raise
    return fresh


def read(folder: Path) -> EncoderReport:
    """Check the tuned encoder of a predictor's folder and return how it was made.

    Raises:
        FileNotFoundError: there is none.
        OSError: it can't be read.
        ValueError: it is damaged or of another format; the message names the file.
    """
    place = folder / ENCODER
    if not os.path.lexists(place):
        raise FileNotFoundError(f"{place}: there is no tuned encoder")
    path = place / NOTE
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        found, report = note["format"], note["report"]
        if found != FORMAT:
            raise ValueError(f"format={found!r}: must be {FORMAT!r}")
        told = EncoderReport(**report)
        wanted: dict[str, str] = dict(note["sha256"])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"{path}: damaged, it is missing") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: damaged, or no note of a tuned encoder ({error})") from error
    checksums = _checksums(place)
    for name in sorted(wanted.keys() | checksums.keys()):
        if wanted.get(name) != checksums.get(name):
            raise ValueError(f"{place / name}: damaged, its SHA-256 is not what {NOTE} says")
    return told


def usable(folder: Path) -> str | None:
    """Return the tuned encoder of a predictor's folder, as `Encoder` takes it; None where there is none.

    A damaged one is reported by a warning and renamed to ``encoder.damaged-N``; what was learned with it is then of
    another encoder, and learning starts anew.

    Raises:
        OSError: it is there but can't be read (permissions, a failing disk); it is left alone.
    """
    place = folder / ENCODER
    try:
        read(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as damage:
        set_aside(place, damage, what="tuned encoder", instead="using the default", logger=logger)
        return None
    return str(place)


def _near(folder: Path) -> Path:
    """Return a place for an encoder in a new folder within the predictor's.

    It has the encoder's name, which is a part of `Encoder.name`. What a killed process left an hour ago is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder, ENCODER)
    return Path(tempfile.mkdtemp(dir=folder, prefix=f".{ENCODER}.", suffix=".tmp")) / ENCODER


def _checksums(place: Path) -> dict[str, str]:
    """Return the SHA-256 of every file but the note, by its path."""
    files = (path for path in sorted(place.rglob("*")) if path.is_file() and path != place / NOTE)
    return {path.relative_to(place).as_posix(): sha256_of(path) for path in files}
