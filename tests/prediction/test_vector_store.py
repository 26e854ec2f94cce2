"""The vector store: what it finds, in which order, and what it refuses."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tests.extent import HANG_S
from vllm_ext.prediction import store_index
from vllm_ext.prediction.vector_store import VectorStore

from .store_parts import EAST, NORTH, NORTH_EAST, lengths_found, random_units, unit


def test_neighbours_come_nearest_first_with_similarity_and_time() -> None:
    store = VectorStore(2)
    store.add([NORTH, NORTH_EAST, EAST], [1, 2, 3], times_s=[10.0, 20.0, 30.0])
    (found,) = store.search(EAST, 3)
    assert found.lengths.tolist() == [3, 2, 1]
    assert found.similarities == pytest.approx([1, 0.5**0.5, 0])
    assert found.times_s.tolist() == [30.0, 20.0, 10.0]


def test_an_empty_store_finds_nothing() -> None:
    (found,) = VectorStore(2).search(EAST, 5)
    assert found.lengths.shape == found.similarities.shape == found.times_s.shape == (0,)


def test_more_neighbours_than_there_are_entries_gives_all() -> None:
    store = VectorStore(2)
    store.add([EAST, NORTH], [1, 2])
    assert lengths_found(store, EAST, 100) == [1, 2]


def test_each_query_of_a_batch_gets_its_own_neighbours() -> None:
    store = VectorStore(2)
    store.add([EAST, NORTH], [1, 2])
    assert [found.lengths.tolist() for found in store.search([NORTH, EAST], 1)] == [[2], [1]]
    assert store.search(np.empty((0, 2)), 1) == []


def test_identical_prompts_with_different_lengths_are_all_found_in_the_order_of_insertion() -> None:
    store = VectorStore(2)
    store.add([EAST, NORTH, EAST, EAST], [5, 7, 3, 4])
    assert lengths_found(store, EAST, 3) == [5, 3, 4]
    assert lengths_found(store, EAST, 2) == [5, 3]


@pytest.mark.parametrize("index", ["flat", "ivf"])
def test_ties_keep_their_order_wherever_they_lie_among_other_vectors(index: str) -> None:
    """A matrix product gives equal rows similarities that differ in the last bit, depending on the row's number."""
    others, query = random_units(900, 384), random_units(1, 384, seed=9)
    mixed = np.where((np.arange(900) % 31 == 0)[:, None], query, others)
    store = VectorStore(384, index=index)  # type: ignore[arg-type]
    store.add(mixed, np.arange(1, 901))
    assert store.index == index
    expected = list(range(1, 901, 31))
    assert lengths_found(store, query, len(expected)) == expected
    assert lengths_found(store, query, 4) == expected[:4]


def test_an_entry_exactly_at_the_threshold_is_found_and_one_below_is_not() -> None:
    store = VectorStore(2)
    store.add([NORTH_EAST], [4])
    (found,) = store.search(EAST, 1)
    edge = float(found.similarities[0])
    assert lengths_found(store, EAST, 1, min_similarity=edge) == [4]
    assert lengths_found(store, EAST, 1, min_similarity=float(np.nextafter(np.float32(edge), np.float32(2)))) == []


def test_an_identical_vector_passes_a_threshold_of_one() -> None:
    vectors = random_units(50, 384)
    store = VectorStore(384)
    store.add(vectors, np.arange(1, 51))
    assert [lengths_found(store, vector, 1, min_similarity=1.0) for vector in vectors] == [[n] for n in range(1, 51)]


@pytest.mark.parametrize("index", ["flat", "ivf"])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.004], ids=["half", "most", "few"])
def test_a_model_sees_only_its_own_entries_and_all_it_asks_for(index: str, share: float) -> None:
    count = 3000
    rng = np.random.default_rng(1)
    models = np.where(rng.random(count) < share, "ours", "theirs")
    vectors = random_units(count, 8)
    store = VectorStore(8, index=index)  # type: ignore[arg-type]
    store.add(vectors, np.arange(1, count + 1), models.tolist())
    ours = np.flatnonzero(models == "ours") + 1
    found = lengths_found(store, vectors[0], 10, model="ours")
    assert len(found) == min(10, len(ours))
    assert set(found) <= set(ours.tolist())
    assert lengths_found(store, vectors[0], 10, model="unknown") == []


def test_an_inverted_file_finds_nine_tenths_of_the_nearest_and_reports_exact_similarities() -> None:
    rng = np.random.default_rng(2)
    topics = random_units(300, 32, seed=3)
    vectors = unit(topics[rng.integers(0, 300, 6000)] + 0.15 * rng.standard_normal((6000, 32)))
    queries = unit(topics[rng.integers(0, 300, 100)] + 0.15 * rng.standard_normal((100, 32)))
    exact, lists = VectorStore(32, index="flat"), VectorStore(32)
    for store in (exact, lists):
        store.add(vectors, np.arange(1, 6001))
    assert (exact.index, lists.index) == ("flat", "ivf")
    hits = 0
    for truth, found, query in zip(exact.search(queries, 10), lists.search(queries, 10), queries, strict=True):
        hits += len(set(truth.lengths.tolist()) & set(found.lengths.tolist()))
        assert found.similarities == pytest.approx(vectors[found.lengths - 1] @ query, abs=1e-6)
        assert (np.diff(found.similarities) <= 0).all()
    assert hits >= 900


# --- edges ------------------------------------------------------------------------------------------------------------


def test_the_same_calls_with_the_same_seed_give_the_same_answers() -> None:
    vectors, queries = random_units(2000, 48), random_units(20, 48, seed=5)

    def answers() -> list[tuple[list[int], list[float]]]:
        store = VectorStore(48, index="ivf", seed=3, capacity=1500)
        store.add(vectors, np.arange(1, 2001))
        return [(found.lengths.tolist(), found.similarities.tolist()) for found in store.search(queries, 8)]

    assert answers() == answers()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1, 0, 0]], [1]), r"vectors: shape \(1, 3\)"),
        (([[1, 1]], [1]), r"vectors\[0\]: length 1\.41"),
        (([[1, 0], [float("nan"), 0]], [1, 2]), r"vectors\[1\]"),
        (([[0, 0]], [1]), r"vectors\[0\]: length 0"),
        (([[1, 0]], [0]), r"lengths\[0\]=0: must be a whole number of 1 to 10000000"),
        (([[1, 0], [0, 1]], [10_000_000, 10_000_001]), r"lengths\[1\]=10000001"),
        (([[1, 0]], [2**63]), "lengths.*=9223372036854775808"),
        (([[1, 0]], [2**70]), "lengths"),
        (([[1, 0]], [1.5]), "lengths"),
        (([[1, 0]], [1, 2]), "lengths"),
        (([[1, 0]], [1], ["a", "b"]), "models"),
        (([[1, 0]], [1], "a"), "models"),
        (([[1, 0]], [1], [], [float("inf")]), "times_s"),
        (([[1, 0]], [1], [], [1.0, 2.0]), "times_s"),
    ],
)
def test_a_wrong_argument_is_named_and_nothing_is_inserted(arguments: tuple[object, ...], message: str) -> None:
    store = VectorStore(2)
    with pytest.raises(ValueError, match=message):
        store.add(*arguments)  # type: ignore[arg-type]
    assert len(store) == 0


@pytest.mark.parametrize("options", [{"dim": 0}, {"capacity": 0}, {"index": "hnsw"}], ids=["dim", "capacity", "index"])
def test_a_senseless_store_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        VectorStore(**{"dim": 2, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(("k", "threshold", "field"), [(0, 0.0, "k="), (1, float("nan"), "min_similarity")])
def test_a_senseless_search_is_refused(k: int, threshold: float, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        VectorStore(2).search(EAST, k, min_similarity=threshold)


def test_prompts_are_forgotten_unless_they_are_to_be_kept() -> None:
    private, keeping = VectorStore(2), VectorStore(2, keep_prompts=True, capacity=1)
    for store in (private, keeping):
        store.add([EAST, NORTH], [1, 2], prompts=["secret", "\x00 \ud800"])
    assert private.entries().prompts is None
    assert keeping.entries().prompts == ("\x00 \ud800",)


def test_names_of_models_that_are_gone_do_not_pile_up() -> None:
    store = VectorStore(8, capacity=4)
    for number, vector in enumerate(random_units(50, 8)):
        store.add(vector, 1, [f"adapter-{number}"])
    assert store.entries().models == tuple(f"adapter-{number}" for number in range(46, 50))
    assert len(store._rows._names) <= 5


def test_a_large_store_without_faiss_is_refused_with_the_command_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_index.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install faiss-cpu"):
        VectorStore(2)
    VectorStore(2, capacity=store_index.FLAT_LIMIT)
    VectorStore(2, index="flat")


def test_importing_the_store_imports_neither_faiss_nor_torch() -> None:
    code = "import sys, vllm_ext.prediction.store_files; print({'faiss', 'torch', 'vllm'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANG_S)
    assert result.stdout.strip() == "set()"


def test_an_inverted_file_proposes_all_equal_vectors_and_each_slot_once() -> None:
    """Which of many equal ones faiss returns is up to it, and the earliest have to be among them."""
    vectors = np.tile(random_units(1, 16), (200, 1))
    lists = store_index.InvertedFile(vectors, seed=0)
    assert sorted(lists.candidates(vectors, vectors[0], 1).tolist()) == list(range(200))
    moved = np.arange(0, 200, 3)
    vectors[moved] = random_units(len(moved), 16, seed=1)
    lists.put(moved, vectors[moved])
    assert len(lists) == 200
    lists.nprobe = lists.num_lists
    assert sorted(lists.candidates(vectors, vectors[0], 200).tolist()) == list(range(200))


def test_lengths_of_prompts_are_kept_and_checked() -> None:
    store = VectorStore(2, capacity=2)
    store.add([[1, 0], [0, 1]], [5, 6], prompt_tokens=[7, 0])
    store.add([1, 0], [8])
    assert store.entries().prompt_tokens.tolist() == [0, 0], "the oldest made room"
    for wrong in ([-1], [1.5], [1, 2], [2**63]):
        with pytest.raises(ValueError, match="prompt_tokens"):
            store.add([1, 0], [8], prompt_tokens=np.array(wrong))
