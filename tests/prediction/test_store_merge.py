"""Merging vector stores: each observation once, by time, and only what fits together."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.prediction.store_files import merge, save
from vllm_ext.prediction.store_rows import Entries
from vllm_ext.prediction.vector_store import VectorStore

from .store_parts import DIM, contents, generation, make_store, random_units


def test_a_merge_holds_each_observation_once_in_the_order_of_time(tmp_path: Path) -> None:
    common = random_units(2, DIM, seed=7)
    for name, times, lengths in (("a", [1.0, 3.0], [10, 30]), ("b", [1.0, 2.0], [10, 20])):
        store = VectorStore(DIM, encoder="enc")
        store.add(common, lengths, ["m", name], times)
        save(store, tmp_path / name)
    merged = merge([tmp_path / "a", tmp_path / "b"])
    assert merged.encoder == "enc"
    entries = merged.entries()
    assert entries.lengths.tolist() == [10, 20, 30]
    assert entries.times_s.tolist() == [1.0, 2.0, 3.0]
    assert entries.models == ("m", "b", "a")


def test_one_prompt_answered_twice_is_two_observations(tmp_path: Path) -> None:
    store = VectorStore(DIM)
    store.add(random_units(1, DIM).repeat(3, axis=0), [5, 5, 6], times_s=[1.0, 2.0, 2.0])
    save(store, tmp_path)
    assert len(merge([tmp_path])) == 3


def test_what_two_models_answered_is_two_observations(tmp_path: Path) -> None:
    """Lengths learned from a dataset have no time: a merge once took the second model's for repeats of the first's."""
    for model in "ab":
        store = VectorStore(DIM, encoder="enc")
        store.add(random_units(30, DIM), range(1, 31), [model] * 30)
        save(store, tmp_path / model)
    merged = merge([tmp_path / "a", tmp_path / "b", tmp_path / "a"])
    assert Counter(merged.entries().models) == {"a": 30, "b": 30}


def test_what_makes_an_observation_is_vector_length_time_and_model() -> None:
    one, other = random_units(2, DIM)
    rows = [
        (one, 5, "m", 1.0), (other, 5, "m", 1.0), (one, 6, "m", 1.0), (one, 5, "n", 1.0), (one, 5, "m", 2.0),
        (one, 5, "", 0.0), (one, 5, "", -0.0),
    ]  # fmt: skip
    vectors, lengths, models, times = zip(*rows, strict=True)
    keys = Entries.checked(DIM, np.stack(vectors), lengths, models, times).keys()
    assert len(set(keys)) == 6
    assert keys[-1] == keys[-2], "there is one zero"


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_prompt_is_kept_if_one_of_the_copies_has_it(tmp_path: Path, order: str) -> None:
    save(make_store(3), tmp_path / "a")
    save(make_store(2, keep_prompts=True), tmp_path / "b")
    entries = merge([tmp_path / name for name in order], keep_prompts=True).entries()
    assert entries.prompts == ("prompt 0", "prompt 1", "")
    assert merge([tmp_path / name for name in order]).entries().prompts is None


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=3), capacity=st.integers(1, 50))
def test_merging_more_than_once_changes_nothing_and_the_latest_stay(sizes: list[int], capacity: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place) / str(number) for number in range(len(sizes))]
        for number, (folder, size) in enumerate(zip(folders, sizes, strict=True)):
            save(make_store(size, seed=number), folder)
        once, twice = merge(folders, capacity=capacity), merge([*folders, *reversed(folders)], capacity=capacity)
    assert contents(once) == contents(twice)
    times = sorted(seed * 1000.0 + n for seed, size in enumerate(sizes) for n in range(size))
    assert once.entries().times_s.tolist() == times[-capacity:]


def test_stores_that_do_not_fit_together_are_refused_and_left_alone(tmp_path: Path) -> None:
    save(make_store(2), tmp_path / "a")
    save(VectorStore(DIM, encoder="foreign"), tmp_path / "b")
    save(VectorStore(DIM + 1, encoder="enc"), tmp_path / "c")
    save(make_store(2), tmp_path / "d")
    (generation(tmp_path / "d") / "entries.npz").write_bytes(b"damaged")
    before = sorted(tmp_path.iterdir())
    for name, message in (("b", "encoder='foreign'"), ("c", "dim=7"), ("d", "damaged")):
        with pytest.raises(ValueError, match=message):
            merge([tmp_path / "a", tmp_path / name])
    with pytest.raises(FileNotFoundError):
        merge([tmp_path / "a", tmp_path / "none"])
    with pytest.raises(ValueError, match="at least one"):
        merge([])
    assert sorted(tmp_path.iterdir()) == before
