"""Threads that use one vector store: what they see of each other, and that searches never wait for long."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from tests.extent import HANG_S
from vllm_ext.prediction.store_files import read, save
from vllm_ext.prediction.store_rows import Entries
from vllm_ext.prediction.vector_store import VectorStore

from .store_parts import DIM, EAST, NORTH, lengths_found, random_units


def test_searches_during_insertions_and_index_builds_see_whole_entries() -> None:
    """Each length names its vector: a torn row, or a slot that changed hands unseen, would give a wrong similarity."""
    count, dim = 4000, 24
    vectors = random_units(count, dim)
    store = VectorStore(dim, capacity=1500, index="ivf")
    done, errors, searched = threading.Event(), list[str](), [0, 0]

    def read(reader: int) -> None:
        rng = np.random.default_rng(reader)
        while not done.is_set() or not searched[reader]:
            query = vectors[rng.integers(count)]
            (found,) = store.search(query, 5, model=("even", None)[reader])
            searched[reader] += 1
            if not np.allclose(vectors[found.lengths - 1] @ query, found.similarities, atol=1e-5):
                errors.append(f"similarities {found} are not those of the lengths' vectors")
            if reader == 0 and (found.lengths % 2).any():
                errors.append(f"{found.lengths}: another model's entry")

    readers = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in readers:
        thread.start()
    try:
        for start in range(0, count, 50):
            numbers = np.arange(start + 1, start + 51)
            store.add(vectors[start : start + 50], numbers, [("even", "odd")[n % 2] for n in numbers])
    finally:
        done.set()
        for thread in readers:
            thread.join()
    assert not errors
    assert len(store) == 1500
    assert store.index == "ivf"


def test_insertions_by_several_threads_are_all_there() -> None:
    store = VectorStore(8)
    vectors = random_units(400, 8)

    def write(part: int) -> None:
        for row in range(part, 400, 4):
            store.add(vectors[row], row + 1)

    writers = [threading.Thread(target=write, args=(part,)) for part in range(4)]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    assert sorted(store.entries().lengths.tolist()) == list(range(1, 401))


def test_searches_go_on_while_everything_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of 100k entries once held up all searches for half a second, at every save."""
    store = VectorStore(2)
    store.add([EAST, NORTH], [1, 2])
    found, meanwhile, real = list[list[int]](), list[list[int]](), store._rows.entries
    searcher = threading.Thread(target=lambda: found.append(lengths_found(store, EAST, 1)))

    def copy_in_the_midst_of_a_search() -> Entries:
        searcher.start()
        searcher.join(timeout=HANG_S)
        meanwhile.extend(found)
        return real()

    monkeypatch.setattr(store._rows, "entries", copy_in_the_midst_of_a_search)
    store.entries()
    searcher.join()
    assert meanwhile == [[1]]


def test_an_insertion_waits_until_everything_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    store = VectorStore(2)
    store.add([EAST], [1])
    real = store._rows.entries
    writer = threading.Thread(target=store.add, args=([NORTH], [2]))

    def copy_in_the_midst_of_an_insertion() -> Entries:
        writer.start()
        writer.join(timeout=0.5)  # it does not end; if it could, it would by then
        return real()

    monkeypatch.setattr(store._rows, "entries", copy_in_the_midst_of_an_insertion)
    copied = store.entries()
    writer.join()
    monkeypatch.undo()
    assert copied.lengths.tolist() == [1]
    assert store.entries().lengths.tolist() == [1, 2]


def test_a_copy_is_the_state_between_two_insertions() -> None:
    """Of 100 rows each, which take the lock more than once."""
    store, vectors, copies = VectorStore(8), random_units(3000, 8), list[Entries]()
    done = threading.Event()

    def copy() -> None:
        while not done.is_set() or not copies:
            copies.append(store.entries())

    copier = threading.Thread(target=copy)
    copier.start()
    try:
        for start in range(0, 3000, 100):
            store.add(vectors[start : start + 100], np.arange(start + 1, start + 101))
    finally:
        done.set()
        copier.join()
    for entries in copies:
        assert len(entries) % 100 == 0
        assert entries.lengths.tolist() == list(range(1, len(entries) + 1))
        assert (entries.vectors == vectors[: len(entries)]).all()


def test_what_is_saved_while_another_thread_adds_is_the_state_at_one_moment(tmp_path: Path) -> None:
    store, vectors, sizes = VectorStore(DIM), random_units(2000, DIM), list[int]()
    done, errors = threading.Event(), list[str]()

    def save_often() -> None:
        while not done.is_set() or not sizes:
            written = save(store, tmp_path)
            entries, _ = read(tmp_path)
            sizes.append(len(entries))
            rows = np.arange(written)
            if (entries.lengths - 1).tolist() != rows.tolist() or (entries.vectors != vectors[rows]).any():
                errors.append(f"{written} written, {entries.lengths}")

    saver = threading.Thread(target=save_often)
    saver.start()
    try:
        for start in range(0, 2000, 20):
            store.add(vectors[start : start + 20], np.arange(start + 1, start + 21))
    finally:
        done.set()
        saver.join()
    assert not errors
    assert all(size % 20 == 0 for size in sizes)
    assert save(store, tmp_path) == 2000
