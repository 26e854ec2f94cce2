"""A full vector store: which entries go, in examples and against a brute-force model."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vllm_ext.prediction import store_index, vector_store
from vllm_ext.prediction.store_ageing import Ageing
from vllm_ext.prediction.vector_store import VectorStore

from .store_parts import EAST, NORTH, NORTH_EAST, lengths_found, random_units, unit

NEVER_REDUNDANT = Ageing(max_copies=10**6, redundant_similarity=2.0)


def test_a_full_store_drops_what_was_inserted_first() -> None:
    store = VectorStore(8, capacity=3)
    store.add(random_units(5, 8), [1, 2, 3, 4, 5])
    assert store.entries().lengths.tolist() == [3, 4, 5]
    assert len(store) == 3


def test_a_full_store_rather_drops_what_the_new_entry_makes_redundant() -> None:
    store = VectorStore(2, capacity=3)
    store.add([NORTH, EAST, NORTH_EAST], [50, 100, 70])
    store.add(unit([1, 0.01]), [105])
    assert store.entries().lengths.tolist() == [50, 70, 105]


@pytest.mark.parametrize(
    ("vector", "length", "model"),
    [([1, 0.01], 140, "m"), ([1, 0.3], 105, "m"), ([1, 0.01], 105, "other")],
    ids=["another length", "another prompt", "another model"],
)
def test_an_entry_that_says_something_else_is_not_redundant(vector: list[float], length: int, model: str) -> None:
    store = VectorStore(2, capacity=3)
    store.add([NORTH, EAST, NORTH_EAST], [50, 100, 70], ["m"] * 3)
    store.add(unit(vector), [length], [model])
    assert store.entries().lengths.tolist() == [100, 70, length]


def test_of_one_vector_the_newest_copies_are_kept_though_there_is_room() -> None:
    store = VectorStore(2, ageing=Ageing(max_copies=2))
    store.add([EAST, NORTH, EAST, EAST], [1, 2, 3, 4], ["m"] * 4)
    store.add([EAST], [5], ["other"])
    assert store.entries().lengths.tolist() == [2, 3, 4, 5]


def test_a_prompt_sent_very_often_takes_little_room() -> None:
    store = VectorStore(2, capacity=1000)
    store.add(np.tile(EAST, (5000, 1)), np.arange(1, 5001))
    assert len(store) == Ageing().max_copies


@pytest.mark.parametrize(
    "options", [{"max_copies": 0}, {"redundant_similarity": -0.1}, {"like_length": 1.5}, {"like_length": float("nan")}]
)
def test_senseless_ageing_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Ageing(**options)  # type: ignore[arg-type]


def test_an_inverted_file_forgets_what_was_dropped_and_is_built_anew_over_a_turnover() -> None:
    store = VectorStore(16, capacity=600, index="ivf", ageing=NEVER_REDUNDANT)
    vectors = random_units(4000, 16)
    for start in range(0, 4000, 100):
        store.add(vectors[start : start + 100], np.arange(start + 1, start + 101))
    assert store.index == "ivf"
    kept = set(store.entries().lengths.tolist())
    assert kept == set(range(3401, 4001))
    for number in (0, 1700, 3399, 3400, 3999):
        found = set(lengths_found(store, vectors[number], 600))
        assert found <= kept
        assert (number + 1 in found) == (number + 1 in kept)


# --- against a brute-force model --------------------------------------------------------------------------------------


@dataclass
class BruteForce:
    """The store as its documentation describes it, entries in the order of insertion."""

    capacity: int
    ageing: Ageing
    entries: list[tuple[NDArray[np.float32], int, str]] = field(default_factory=list)

    def nearest(self, query: NDArray[np.float32], model: str | None = None) -> list[tuple[float, int]]:
        """(similarity, place among the entries) of all, nearest first."""
        scored = [
            (float(np.float32(min(1.0, sum(a * b for a, b in zip(vector.tolist(), query.tolist(), strict=True))))), at)
            for at, (vector, _, name) in enumerate(self.entries)
            if model in (None, name)
        ]
        return sorted(scored, key=lambda pair: (-pair[0], pair[1]))

    def add(self, vector: NDArray[np.float32], length: int, model: str) -> None:
        same = [at for at, e in enumerate(self.entries) if (e[0] == vector).all() and e[2] == model]
        if len(same) >= self.ageing.max_copies:
            del self.entries[same[0]]
        elif len(self.entries) >= self.capacity:
            del self.entries[self.redundant(vector, length, model)]
        self.entries.append((vector, length, model))

    def redundant(self, vector: NDArray[np.float32], length: int, model: str) -> int:
        for similarity, at in self.nearest(vector)[:8]:
            _, other, name = self.entries[at]
            near = similarity >= np.float32(self.ageing.redundant_similarity)
            if near and name == model and abs(other - length) <= self.ageing.like_length * max(other, length):
                return at
        return 0


POINTS = [p for p in np.ndindex(3, 3, 3) if any(p)]
STEPS = st.lists(
    st.tuples(st.sampled_from(POINTS), st.integers(1, 40), st.sampled_from("ab")), min_size=15, max_size=60
)
AGEINGS = st.builds(
    Ageing, max_copies=st.integers(1, 4), redundant_similarity=st.sampled_from([0.9, 0.98, 2.0]),
    like_length=st.sampled_from([0.0, 0.2, 1.0]),
)  # fmt: skip


@pytest.mark.parametrize("index", ["flat", "ivf"])
@settings(max_examples=60, deadline=None)
@given(
    steps=STEPS,
    capacity=st.integers(1, 12),
    ageing=AGEINGS,
    batch=st.integers(1, 9),
    query=st.sampled_from(POINTS),
    k=st.integers(1, 40),
    threshold=st.sampled_from([-1.0, 0.5, 0.9, 1.0]),
    model=st.sampled_from([None, "a", "b"]),
)
def test_the_store_behaves_as_documented(
    index: str,
    steps: list[tuple[tuple[int, ...], int, str]],
    capacity: int,
    ageing: Ageing,
    batch: int,
    query: tuple[int, ...],
    k: int,
    threshold: float,
    model: str | None,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vector_store, "_FEWEST_FOR_LISTS", 4)  # so few entries make one list: the search is exhaustive
        patch.setattr(store_index, "_GATHER_LIMIT", 2)
        patch.setattr(store_index, "_SPARE", 1)
        store = VectorStore(3, capacity=capacity, index=index, ageing=ageing)  # type: ignore[arg-type]
        truth = BruteForce(capacity, ageing)
        for start in range(0, len(steps), batch):
            points, lengths, models = zip(*steps[start : start + batch], strict=True)
            vectors = unit([list(point) for point in points])
            store.add(vectors, lengths, models)
            for entry in zip(vectors, lengths, models, strict=True):
                truth.add(*entry)
        held = store.entries()
        assert held.lengths.tolist() == [length for _, length, _ in truth.entries]
        assert held.models == tuple(name for _, _, name in truth.entries)
        near = [pair for pair in truth.nearest(unit(query), model)[:k] if pair[0] >= np.float32(threshold)]
        (found,) = store.search(unit(query), k, min_similarity=threshold, model=model)
        assert found.lengths.tolist() == [truth.entries[at][1] for _, at in near]
        assert found.similarities.tolist() == pytest.approx([similarity for similarity, _ in near], abs=1e-6)
