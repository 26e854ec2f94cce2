"""Similar prompts: the same as by brute force, whatever is in an index or in a tail, and never of another salt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.learned_parts import DIM, entries, entry, vector_of
from vllm_ext.prediction import neighbours as module
from vllm_ext.prediction.neighbours import Neighbours, by_group
from vllm_ext.prediction.store import NewEntry

M = ("m", b"")


def some(count: int, seed: int = 0, **options: Any) -> list[NewEntry]:
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((count, DIM)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    made = [NewEntry(f"t{i}", vectors[i], i + 1, "m") for i in range(count)]
    return [each._replace(**options) for each in made]


def loaded(of: list[NewEntry], key: module.Key = M) -> Neighbours:
    found = Neighbours(DIM)
    rows = entries(of)
    found.load(key, rows, by_group(rows).get(key))
    return found


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 60), st.lists(st.integers(1, 30), max_size=6), st.integers(1, 12), st.booleans(), st.integers(0, 99)
)
def test_index_and_tail_find_what_brute_force_finds(
    first: int, batches: list[int], count: int, aborted: bool, seed: int
) -> None:
    """With a tail of 16 rows, so that all transitions happen."""
    rows = some(first + sum(batches), seed)
    if aborted:
        rows = [row._replace(aborted=number % 5 == 0) for number, row in enumerate(rows)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TAIL", 16)
        found = loaded(rows[:first])
        done = first
        for batch in batches:
            full = found.add(entries(rows[done : done + batch]))
            done += batch
            for key in full:
                found.load(key, entries(rows[:done]), by_group(entries(rows[:done])).get(key))
        asked = np.stack([row.vector for row in some(3, seed + 1000)])
        near = found.search(M, asked, count, ["", "", ""])
    known = [row for row in rows if not row.aborted]
    assert found.rows == len(known)
    for vector, said in zip(asked, near, strict=True):
        similar = np.array([row.vector.astype(np.float16).astype(np.float32) @ vector for row in known])
        best = np.sort(similar)[::-1][:count]
        np.testing.assert_allclose(said.similarities, best, atol=2e-3)
        for tokens, similarity in zip(said.tokens.tolist(), said.similarities.tolist(), strict=True):
            (row,) = (row for row in known if row.tokens == tokens)
            assert row.vector @ vector == pytest.approx(similarity, abs=2e-3)


def test_inverted_lists_find_nearly_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LISTED_FROM", 2000)
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((40, DIM))
    vectors = centres[rng.integers(40, size=6000)] + 0.4 * rng.standard_normal((6000, DIM))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    rows = [NewEntry(f"t{i}", vectors[i].astype(np.float32), i + 1, "m") for i in range(6000)]
    found = loaded(rows)
    assert found._views[M].index.nprobe < 100, "not every list is looked at"
    asked = vectors[:100].astype(np.float32)
    near = found.search(M, asked, 10, [""] * 100)
    true = np.argsort(-(asked @ vectors.T.astype(np.float32)), axis=1)[:, :10] + 1
    assert np.mean([len(set(n.tokens.tolist()) & set(t)) / 10 for n, t in zip(near, true.tolist(), strict=True)]) > 0.8
    assert [n.tokens[0] for n in near] == list(range(1, 101)), "an identical prompt is always found"


def test_models_and_salts_never_meet() -> None:
    found = Neighbours(DIM)
    for number, (model, salt) in enumerate([("m", b"ann"), ("m", b"bob"), ("n", b"ann"), ("m", b"")]):
        found.add(entries([entry("the same words", number + 1, model=model, salt=salt)]))
    for number, key in enumerate([("m", b"ann"), ("m", b"bob"), ("n", b"ann"), ("m", b"")]):
        (near,) = found.search(key, vector_of("the same words")[None], 10, [""])
        assert near.tokens.tolist() == [number + 1]
    (near,) = found.search(("n", b"bob"), vector_of("the same words")[None], 10, [""])
    assert len(near.tokens) == 0


def test_prompts_of_the_same_tag_go_first() -> None:
    found = Neighbours(DIM)
    found.add(entries([entry("write a poem", 10, tag="chat"), entry("write a song", 20, tag="code")]))
    asked = vector_of("write a poem")[None]
    assert found.search(M, asked, 2, [""])[0].tokens.tolist() == [10, 20]
    (other,) = found.search(M, asked, 2, ["code"])
    assert other.similarities[other.tokens == 10] == pytest.approx(0.9, abs=0.01)


def test_a_search_sees_what_was_there_when_it_began() -> None:
    """The learner adds to the arrays that a search looks at, beyond what it looks at."""
    found = Neighbours(DIM)
    rows = some(40)
    found.add(entries(rows[:20]))
    view = found._views[M]
    before = module._found(view, rows[30].vector[None], 20)
    for start in range(20, 40):
        found.add(entries(rows[start : start + 1]))
    for one, other in zip(before, module._found(view, rows[30].vector[None], 20), strict=True):
        np.testing.assert_array_equal(one, other)


def test_salts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_GROUPS", 5)
    found = Neighbours(DIM)
    for number in range(20):
        found.add(entries([entry("a", 1, salt=b"%d" % number)]))
    assert found.rows == 5
    assert len(found.search(("m", b"19"), vector_of("a")[None], 1, [""])[0].tokens) == 1
    assert len(found.search(("m", b"0"), vector_of("a")[None], 1, [""])[0].tokens) == 0


def test_groups_without_entries_go_when_all_are_loaded() -> None:
    found = Neighbours(DIM)
    found.add(entries([entry("a", 1), entry("b", 2, salt=b"s")]))
    found.load_all(entries([entry("a", 5)]))
    assert found.rows == 1
    assert len(found.search(("m", b"s"), vector_of("b")[None], 1, [""])[0].tokens) == 0
