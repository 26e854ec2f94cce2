"""What the tests of the vector store share. Loaded by path in subprocesses too: no relative imports."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_ext.prediction.store_files import load
from vllm_ext.prediction.vector_store import VectorStore

DIM = 6


def unit(rows: NDArray[np.floating] | list[list[float]]) -> NDArray[np.float32]:
    matrix = np.asarray(rows, np.float64)
    return (matrix / np.linalg.norm(matrix, axis=-1, keepdims=True)).astype(np.float32)


def random_units(count: int, dim: int, seed: int = 0) -> NDArray[np.float32]:
    return unit(np.random.default_rng(seed).standard_normal((count, dim)))


EAST, NORTH, NORTH_EAST = unit([[1, 0], [0, 1], [1, 1]])


def lengths_found(store: VectorStore, query: NDArray[np.float32], k: int, **options: object) -> list[int]:
    (found,) = store.search(query, k, **options)  # type: ignore[arg-type]
    return [int(length) for length in found.lengths]


def make_store(count: int, seed: int = 0, *, keep_prompts: bool = False) -> VectorStore:
    store = VectorStore(DIM, encoder="enc", keep_prompts=keep_prompts)
    models = [f"m{n % 3}" for n in range(count)]
    times = [seed * 1000.0 + n for n in range(count)]
    store.add(
        random_units(count, DIM, seed),
        range(1, count + 1),
        models,
        times,
        prompts=[f"prompt {n}" for n in range(count)],
    )
    return store


def load_enc(folder: Path, **options: object) -> VectorStore:
    return load(folder, DIM, encoder="enc", **options)  # type: ignore[arg-type]


def contents(store: VectorStore) -> tuple[object, ...]:
    entries = store.entries()
    return (entries.vectors.tobytes(), entries.lengths.tolist(), entries.times_s.tolist(), entries.models)


def generation(folder: Path) -> Path:
    return folder / json.loads((folder / "CURRENT").read_text())["generation"]
