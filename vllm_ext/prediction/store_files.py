"""A vector store on disk, whole at any moment: killed while it is written, the folder holds the old or the new state.

    store/CURRENT              which generation counts, and the SHA-256 of its metadata
    store/gen-000007-1a2b3c4d/
        metadata.json          format, encoder, dim, entries, names of models, SHA-256 of the other files
        entries.npz            vectors, lengths, times, model numbers; arrays only, no pickle
        prompts.json           only of a store that keeps prompts

A save writes a new folder, then replaces CURRENT, then removes what does not count any more. One process may save into
a folder at a time (a lock makes others wait); any number may read it meanwhile. Embeddings tell what was asked: files
and folders are their owner's only.

Without CURRENT nothing can be read, as no checksum says what of a generation is right. It is damage like any other:
`load` sets the folder aside, and a save that finds it so keeps the generation as ``gen-...lost``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vllm_ext.observability.files import set_aside
from vllm_ext.prediction import store_generation
from vllm_ext.prediction.store_access import alone
from vllm_ext.prediction.store_ageing import Ageing
from vllm_ext.prediction.store_rows import Entries
from vllm_ext.prediction.vector_store import VectorStore

logger = logging.getLogger(__name__)

MAX_BYTES = 512 * 2**20
_BYTES_BESIDE_VECTOR = 28
"""Lengths, time and model number of an entry."""
_BYTES_BESIDE_ENTRIES = 4096
"""Headers and metadata."""


def save(store: VectorStore, folder: Path, *, max_bytes: int = MAX_BYTES) -> int:
    """Write a store; the state that was there before is replaced whole, or left as it was.

    Args:
        store: Threads may go on searching and adding; what is written is its state at one moment.
        folder: Made if it is not there.
        max_bytes: Size of one generation; the entries inserted last that fit are written. While it is written, the
            generation before is there as well.

    Returns:
        Entries written.

    Raises:
        OSError: it can't be written; the state before still counts.
        ValueError: ``max_bytes`` doesn't even hold the metadata.
    """
    if max_bytes < _BYTES_BESIDE_ENTRIES:
        raise ValueError(f"max_bytes={max_bytes!r}: must be at least {_BYTES_BESIDE_ENTRIES}")
    entries = _newest_within(store.entries(), max_bytes, store.encoder)
    store_generation.write(folder, entries, store.encoder)
    return len(entries)


def read(folder: Path) -> tuple[Entries, dict[str, Any]]:
    """Return entries, oldest insertion first, and metadata (encoder, dim, entries, models); nothing is changed on disk.

    Raises:
        FileNotFoundError: there is no store in this folder.
        ValueError: it is damaged or of another format; the message names the file and what is wrong.
        OSError: it can't be read.
    """
    return store_generation.read(folder)


def load(
    folder: Path,
    dim: int,
    *,
    encoder: str = "",
    capacity: int = 100_000,
    index: Literal["auto", "flat", "ivf"] = "auto",
    seed: int = 0,
    ageing: Ageing | None = None,
    keep_prompts: bool = False,
) -> VectorStore:
    """Read a store for use; whatever happens, a usable one is returned.

    A missing folder gives an empty store. A damaged one, or one of another format, encoder or width, is reported by
    a warning, renamed to ``<folder>.damaged-N``, and gives an empty store. Of more entries than ``capacity`` the ones
    inserted last are taken. Prompts in the files are forgotten unless ``keep_prompts``.

    Args as of `VectorStore`.

    Raises:
        OSError: the folder can't be read (permissions, a failing disk); it is left alone.
    """
    store = VectorStore(
        dim, capacity=capacity, index=index, seed=seed, ageing=ageing, encoder=encoder, keep_prompts=keep_prompts
    )
    try:
        _fill(store, _read_for(store, folder))
    except FileNotFoundError:
        pass
    except ValueError:
        _look_again(store, folder)
    return store


def merge(
    folders: Sequence[Path],
    *,
    capacity: int = 100_000,
    index: Literal["auto", "flat", "ivf"] = "auto",
    seed: int = 0,
    ageing: Ageing | None = None,
    keep_prompts: bool = False,
) -> VectorStore:
    """Read several stores into one, ordered by time; the folders are left alone.

    Entries equal in vector, length, time and model are one observation that was learned twice (copies of a store, then
    both went on): one of them is kept, with its prompt if one of them has it. Of entries without a time, with time 0,
    equal ones collapse as well. If more remain than ``capacity``, the latest are kept.

    Args: ``folders`` holds at least one; the others as of `VectorStore`.

    Raises:
        FileNotFoundError: one of them holds no store.
        ValueError: one is damaged, or they differ in encoder or width; the message names the folder.
    """
    if not folders:
        raise ValueError("folders=[]: must name at least one store")
    found = [(folder, *read(folder)) for folder in folders]
    first, _, metadata = found[0]
    for folder, _, other in found[1:]:
        for field in ("encoder", "dim"):
            if other[field] != metadata[field]:
                raise ValueError(
                    f"{folder}: {field}={other[field]!r}: must be {metadata[field]!r}, as of {first}, to be merged"
                )
    store = VectorStore(
        metadata["dim"],
        capacity=capacity,
        index=index,
        seed=seed,
        ageing=ageing,
        encoder=metadata["encoder"],
        keep_prompts=keep_prompts,
    )
    _fill(store, _without_repeats(_joined([entries for _, entries, _ in found])))
    return store


def _joined(parts: Sequence[Entries]) -> Entries:
    """All entries by time; of equal times the earlier part's first, in their order."""
    prompts = None
    if any(part.prompts is not None for part in parts):
        prompts = tuple(text for part in parts for text in part.prompts or ("",) * len(part))
    whole = Entries(
        vectors=np.concatenate([part.vectors for part in parts]),
        lengths=np.concatenate([part.lengths for part in parts]),
        times_s=np.concatenate([part.times_s for part in parts]),
        models=tuple(name for part in parts for name in part.models),
        prompt_tokens=np.concatenate([part.prompt_tokens for part in parts]),
        prompts=prompts,
    )
    return whole.take(np.argsort(whole.times_s, kind="stable"))


def _without_repeats(entries: Entries) -> Entries:
    first: dict[bytes, int] = {}
    prompts = list(entries.prompts or ())
    for row, key in enumerate(entries.keys()):
        kept = first.setdefault(key, row)
        if prompts and not prompts[kept]:
            prompts[kept] = prompts[row]
    if prompts:
        entries = replace(entries, prompts=tuple(prompts))
    return entries.take(np.fromiter(first.values(), np.intp, len(first)))


def _read_for(store: VectorStore, folder: Path, *, in_alone: bool = False) -> Entries:
    """Raises ValueError for damage and for entries of another kind of store as well."""
    entries, metadata = store_generation.read(folder, in_alone=in_alone)
    for field, wanted in (("dim", store.dim), ("encoder", store.encoder)):
        if metadata[field] != wanted:
            raise ValueError(f"{folder}: {field}={metadata[field]!r}: must be {wanted!r}")
    return entries


def _look_again(store: VectorStore, folder: Path) -> None:
    """Set aside what is damaged, while nobody saves: it may have been replaced since, and what is new must stay."""
    with ExitStack() as stack:
        with suppress(OSError):  # a read-only place, or no folder: nobody saves there
            stack.enter_context(alone(folder))
        try:
            _fill(store, _read_for(store, folder, in_alone=True))
        except FileNotFoundError:
            return
        except ValueError as damage:
            set_aside(folder, damage, what="vector store", instead="starting with none", logger=logger)


def _fill(store: VectorStore, entries: Entries) -> None:
    last = entries.take(slice(max(0, len(entries) - store.capacity), None))
    store.add(
        last.vectors,
        last.lengths,
        last.models,
        last.times_s,
        prompts=last.prompts,
        prompt_tokens=last.prompt_tokens,
    )


def _newest_within(entries: Entries, max_bytes: int, encoder: str) -> Entries:
    """The entries inserted last whose files together stay within so many bytes."""
    sizes = np.full(len(entries), 4 * entries.vectors.shape[1] + _BYTES_BESIDE_VECTOR, np.int64)
    if entries.prompts is not None:
        sizes += np.fromiter(map(_bytes_of_text, entries.prompts), np.int64, len(entries))
    for name, row in {name: row for row, name in enumerate(entries.models)}.items():  # its last row writes a name
        sizes[row] += _bytes_of_text(name)
    room = max_bytes - _BYTES_BESIDE_ENTRIES - _bytes_of_text(encoder)
    fitting = int(np.searchsorted(np.cumsum(sizes[::-1]), room, side="right"))
    return entries if fitting == len(entries) else entries.take(slice(len(entries) - fitting, None))


def _bytes_of_text(text: str) -> int:
    """Bytes a text takes in a JSON list, with its separator and indentation."""
    return len(json.dumps(text)) + 8
