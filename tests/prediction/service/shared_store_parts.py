"""What the tests of the shared store share: servers that open, learn and save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ext.prediction import store_files
from vllm_ext.prediction.service.shared_store import SharedStore

from .parts import DIM, units

VECTORS = units(2000)


def opened(folder: Path, *, encoder: str = "enc", **options: Any) -> SharedStore:
    """As a server that starts."""
    store = store_files.load(folder, DIM, encoder=encoder, **options)
    return SharedStore(store, folder, max_bytes=1 << 24)


def learn(shared: SharedStore, lengths: Sequence[int], *, vector: int | None = None) -> None:
    """Insert requests of these lengths; the length is also the number of the vector, and the time."""
    shared.add(
        VECTORS[[length if vector is None else vector for length in lengths]],
        np.array(lengths, dtype=np.int64),
        ["m"] * len(lengths),
        np.array(lengths, dtype=np.float64),
        prompts=[f"prompt {length}" for length in lengths],
    )


def known(shared: SharedStore) -> list[int]:
    return sorted(shared.store.entries().lengths.tolist())


def saved(folder: Path) -> list[int]:
    entries, _ = store_files.read(folder)
    return sorted(entries.lengths.tolist())


def state(folder: Path) -> bytes:
    """What differs after each save."""
    return (folder / "CURRENT").read_bytes()
