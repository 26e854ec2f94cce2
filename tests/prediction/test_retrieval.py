"""Algorithm 1 of ALISE: worked by hand, at the threshold's edge, and its laws."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.prediction.estimate import Estimate
from vllm_ext.prediction.retrieval import estimate, weighted_quantile


class Found(NamedTuple):
    lengths: npt.NDArray[Any]
    similarities: npt.NDArray[Any]


def found(*pairs: tuple[int, float]) -> Found:
    """Neighbours as (length, similarity), in the types of the vector store."""
    return Found(np.array([p[0] for p in pairs], np.int64), np.array([p[1] for p in pairs], np.float32))


PAIRS = st.lists(st.tuples(st.integers(1, 10**5), st.floats(0.01, 1)), min_size=1, max_size=20)


def test_algorithm_1_by_hand() -> None:
    """s0 = 0.7 leaves 0.9 and 0.75 (0.6 is too far): (0.9 * 100 + 0.75 * 320) / 1.65 = 200; 90 % of weight at 320."""
    e = estimate(found((100, 0.9), (320, 0.75), (5000, 0.6)), 1000, min_similarity=0.7)
    assert e is not None
    assert e[:4] == (200, 320, "retrieval", 2)
    assert e.similarity == pytest.approx(0.9)


def test_nothing_similar_is_case_1() -> None:
    assert estimate(found((100, 0.69)), 1000, min_similarity=0.7) is None
    assert estimate(found(), 1000) is None


@pytest.mark.parametrize("s0", [0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0])
def test_a_similarity_equal_to_the_threshold_passes(s0: float) -> None:
    """Line 7 is `S < s0`. 0.7 as float32 is below 0.7 as float64, which must not decide."""
    assert estimate(found((50, s0)), 1000, min_similarity=s0) is not None
    below = float(np.nextafter(np.float32(s0), np.float32(0)))
    assert estimate(found((50, below)), 1000, min_similarity=s0) is None


def test_identical_prompts_of_different_lengths_are_averaged() -> None:
    assert estimate(found((10, 1.0), (20, 1.0), (60, 1.0)), 1000)[:2] == (30, 60)  # type: ignore[index]


def test_opposite_prompts_never_count() -> None:
    assert estimate(found((10, -0.9), (20, 0.0)), 1000, min_similarity=-1) is None
    assert estimate(found((10, -0.9), (20, 0.5)), 1000, min_similarity=-1)[:2] == (20, 20)  # type: ignore[index]


def test_the_client_s_bound_caps_both() -> None:
    assert estimate(found((500, 0.9), (900, 0.9)), 64)[:2] == (64, 64)  # type: ignore[index]


@given(pairs=PAIRS, max_tokens=st.integers(1, 10**6), seed=st.integers(0, 99))
def test_an_estimate_lies_among_its_neighbours_in_any_order(
    pairs: list[tuple[int, float]], max_tokens: int, seed: int
) -> None:
    e = estimate(found(*pairs), max_tokens, min_similarity=0)
    assert e is not None
    lengths = [length for length, _ in pairs]
    assert min(*lengths, max_tokens) <= e.tokens <= e.p90 <= min(max(lengths), max_tokens)
    shuffled = [pairs[i] for i in np.random.default_rng(seed).permutation(len(pairs))]
    again = estimate(found(*shuffled), max_tokens, min_similarity=0)
    assert again is not None
    assert abs(again.tokens - e.tokens) <= 1, "a sum in another order can round the other way"
    assert again[1:] == e[1:] or again.tokens != e.tokens


@given(lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=30), q=st.floats(0, 1))
def test_equal_weights_give_the_plain_quantile(lengths: list[int], q: float) -> None:
    values = np.asarray(lengths).astype(np.float64)
    position = q * len(lengths)
    if abs(position - round(position)) > 1e-6:
        expected = float(np.quantile(values, q, method="inverted_cdf"))
        assert weighted_quantile(values, np.full(len(lengths), 0.3, dtype=np.float64), q) == expected


def test_nine_of_ten_equal_weights_reach_90_percent() -> None:
    """18 times 0.85 is a little less than 90 % of 20 times 0.85 in floating point; the 18th still is the quantile."""
    assert weighted_quantile(np.arange(1, 21).astype(np.float64), np.full(20, 0.85), 0.9) == 18


@pytest.mark.parametrize(
    ("neighbours", "message"),
    [
        (Found(np.array([1, 2]), np.array([0.9])), r"must be \[k\] alike"),
        (found((0, 0.9)), "at least 1 token"),
        (found((5, float("nan"))), "must be finite"),
    ],
)
def test_wrong_neighbours_are_refused(neighbours: Found, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate(neighbours, 100)
    with pytest.raises(ValueError, match=r"min_similarity=1\.5: must be -1 to 1"):
        estimate(found((5, 0.9)), 100, min_similarity=1.5)


def test_the_result_is_an_estimate() -> None:
    assert estimate(found((7, 1.0)), 100) == Estimate(7, 7, "retrieval", 1, 1.0)
