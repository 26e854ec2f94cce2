"""What a store takes over from another one: at its place in time, so that the latest of both are kept."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vllm_ext.prediction.service.shared_store import SharedStore
from vllm_ext.prediction.store_ageing import Ageing
from vllm_ext.prediction.store_rows import Entries
from vllm_ext.prediction.vector_store import VectorStore

from .store_parts import DIM, EAST, NORTH, NORTH_EAST, random_units, unit

NEVER_REDUNDANT = Ageing(max_copies=10**6, redundant_similarity=2.0)


def make(vectors: NDArray[np.float32], lengths: list[int], times: list[float], model: str = "m") -> Entries:
    return Entries.checked(vectors.shape[1], vectors, lengths, [model] * len(lengths), times)


def times_of(store: VectorStore) -> list[float]:
    return [float(time_s) for time_s in store.entries().times_s]


def test_entries_go_where_they_belong_in_time() -> None:
    store = VectorStore(2)
    store.add([EAST, NORTH], [10, 30], ["m"] * 2, [1.0, 3.0])
    assert store.absorb(make(np.stack([NORTH_EAST, NORTH_EAST]), [20, 40], [2.0, 4.0])) == 2
    assert store.entries().lengths.tolist() == [10, 20, 30, 40]
    assert times_of(store) == [1.0, 2.0, 3.0, 4.0]


def test_a_full_store_takes_what_is_later_than_its_oldest_and_that_goes_first() -> None:
    store = VectorStore(DIM, capacity=3, ageing=NEVER_REDUNDANT)
    vectors = random_units(9, DIM)
    store.add(vectors[:3], [1, 2, 3], ["m"] * 3, [10.0, 30.0, 50.0])
    assert store.absorb(make(vectors[3:6], [4, 5, 6], [5.0, 10.0, 40.0])) == 1
    assert times_of(store) == [30.0, 40.0, 50.0]
    store.add(vectors[6:8], [7, 8], ["m"] * 2, [60.0, 70.0])
    assert times_of(store) == [50.0, 60.0, 70.0], "what leaves next is the oldest by time, not by insertion"


def test_what_has_no_time_is_older_than_all_that_has_one() -> None:
    store = VectorStore(DIM, capacity=3, ageing=NEVER_REDUNDANT)
    vectors = random_units(9, DIM)
    store.add(vectors[:3], [1, 2, 3], ["m"] * 3, [7.0, 8.0, 0.0])
    assert store.absorb(make(vectors[3:5], [4, 5], [0.0, 6.0])) == 1
    assert store.entries().lengths.tolist() == [5, 1, 2]


def test_a_copy_replaces_older_copies_only() -> None:
    store = VectorStore(2, ageing=Ageing(max_copies=2))
    store.add([EAST, EAST, NORTH], [20, 40, 1], ["m"] * 3, [2.0, 4.0, 1.0])
    assert store.absorb(make(np.stack([EAST] * 4), [10, 30, 50, 60], [1.0, 3.0, 5.0, 6.0])) == 2
    assert store.entries().lengths.tolist() == [1, 50, 60]
    store.add([EAST], [70], ["m"], [7.0])
    assert store.entries().lengths.tolist() == [1, 60, 70]


@pytest.mark.parametrize(("time_s", "kept"), [(1.5, [50, 100, 70]), (3.5, [50, 70, 105])])
def test_of_two_that_say_the_same_the_later_is_kept(time_s: float, kept: list[int]) -> None:
    store = VectorStore(2, capacity=3)
    store.add([NORTH, EAST, NORTH_EAST], [50, 100, 70], ["m"] * 3, [1.0, 2.0, 3.0])
    store.absorb(make(unit([[1, 0.01]]), [105], [time_s]))
    assert store.entries().lengths.tolist() == kept


@pytest.mark.parametrize("index", ["flat", "ivf"])
@settings(max_examples=60, deadline=None)
@given(
    ours=st.lists(st.integers(0, 9), max_size=12),
    theirs=st.lists(st.integers(0, 9), max_size=12),
    later=st.lists(st.integers(10, 19), max_size=4),
    capacity=st.integers(1, 15),
)
def test_the_latest_of_both_are_kept(
    index: str, ours: list[int], theirs: list[int], later: list[int], capacity: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_ext.prediction.vector_store._FEWEST_FOR_LISTS", 4)
        store = VectorStore(DIM, capacity=capacity, index=index, ageing=NEVER_REDUNDANT)  # type: ignore[arg-type]
        vectors = random_units(30, DIM)
        lengths = list(range(1, 31))  # each names its vector
        store.add(vectors[: len(ours)], lengths[: len(ours)], ["m"] * len(ours), ours)
        held = times_of(store)
        part = slice(len(ours), len(ours) + len(theirs))
        inserted = store.absorb(make(vectors[part], lengths[part], [float(time_s) for time_s in theirs]))
        expected = sorted([*held, *theirs])[-capacity:]
        assert times_of(store) == expected
        assert inserted == sum(length > len(ours) for length in store.entries().lengths)
        for number, time_s in enumerate(later, start=26):
            store.add(vectors[number], number + 1, ["m"], [time_s])
        entries = store.entries()
        assert entries.times_s.tolist() == [*expected, *later][-capacity:]
        assert (entries.vectors == vectors[entries.lengths - 1]).all()
        for length in entries.lengths.tolist():
            (found,) = store.search(vectors[length - 1], 1)
            assert found.lengths.tolist() == [length]


def test_another_width_is_refused() -> None:
    store = VectorStore(2)
    with pytest.raises(ValueError, match="width 6, must be 2"):
        store.absorb(make(random_units(1, DIM), [1], [1.0]))
    assert len(store) == 0


def test_searches_meanwhile_see_whole_entries() -> None:
    """Each length names its vector."""
    vectors = random_units(1200, 16)
    store = VectorStore(16, capacity=400, index="ivf")
    store.add(vectors[:400], np.arange(1, 401), ["m"] * 400, np.arange(400) + 100.0)
    done, errors, searched = threading.Event(), list[str](), [0]

    def search() -> None:
        while not done.is_set() or not searched[0]:
            query = vectors[searched[0] % 1200]
            (found,) = store.search(query, 5)
            searched[0] += 1
            if not np.allclose(vectors[found.lengths - 1] @ query, found.similarities, atol=1e-5):
                errors.append(f"similarities {found} are not those of the lengths' vectors")

    searcher = threading.Thread(target=search)
    searcher.start()
    try:
        for start in range(400, 1200, 100):
            theirs = vectors[start : start + 100]
            store.absorb(make(theirs, list(range(start + 1, start + 101)), [float(start)] * 100))
    finally:
        done.set()
        searcher.join()
    assert not errors
    assert len(store) == 400


# --- two servers ------------------------------------------------------------------------------------------------------


def servers(folder: Path, capacity: int) -> list[SharedStore]:
    """One that learned from second 0 on, one from second 1000 on; both full."""
    made = [SharedStore(VectorStore(DIM, capacity=capacity, encoder="e"), folder, max_bytes=2**29) for _ in range(2)]
    for number, server in enumerate(made):
        vectors = random_units(capacity, DIM, seed=number)
        server.add(vectors, np.arange(1, capacity + 1), ["m"] * capacity, np.arange(capacity) + 1000.0 * number)
    return made


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["older first", "newer first"])
def test_a_full_store_keeps_its_own_newer_entries(tmp_path: Path, order: tuple[int, int]) -> None:
    """The other server's older entries came in as the newest ones, and drove out every one of its own."""
    made = servers(tmp_path / "store", 100)
    for number in order:
        made[number].save()
    assert made[1].store.entries().times_s.min() >= 1000
    made[0].save()
    assert made[0].store.entries().times_s.tolist() == made[1].store.entries().times_s.tolist()


def test_two_full_stores_come_to_rest(tmp_path: Path) -> None:
    made, states = servers(tmp_path / "store", 50), list[bytes]()
    for _ in range(6):
        for server in made:
            server.save()
        states.append((tmp_path / "store" / "CURRENT").read_bytes())
    assert len(set(states[1:])) == 1


def test_what_the_other_servers_model_answered_is_no_repeat(tmp_path: Path) -> None:
    made = [SharedStore(VectorStore(DIM, encoder="e"), tmp_path / "store", max_bytes=2**29) for _ in range(2)]
    for server, model in zip(made, "ab", strict=True):
        server.add(random_units(5, DIM), np.arange(1, 6), [model] * 5, np.zeros(5))
        server.save()
    assert sorted(made[1].store.entries().models) == ["a"] * 5 + ["b"] * 5
