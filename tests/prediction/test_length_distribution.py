"""Length distribution of Past-Future: the window against a plain model, sampling by its frequencies, tags."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.prediction.length_distribution import LengthDistribution, TaggedLengthDistributions, observe_all

LENGTHS = st.lists(st.integers(1, 60), max_size=60)


def filled(*lengths: int, start: int = 1000) -> LengthDistribution:
    """A window that holds exactly these lengths."""
    d = LengthDistribution(start, window=len(lengths), start_size=1)
    observe_all(d, lengths)
    return d


@given(lengths=LENGTHS, window=st.integers(1, 20), data=st.data())
def test_the_window_is_the_last_lengths(lengths: list[int], window: int, data: st.DataObject) -> None:
    start_size = data.draw(st.integers(1, window))
    d = LengthDistribution(100, window=window, start_size=start_size)
    model = deque([100] * start_size, maxlen=window)
    for length in lengths:
        d.observe(length)
        model.append(length)
        values, shares = d.probabilities()
        assert np.repeat(values, np.rint(shares * len(d)).astype(int)).tolist() == sorted(model)
        assert shares.sum() == pytest.approx(1)
    assert len(d) == len(model)
    assert d.recent().tolist() == lengths[-window:]
    assert d.num_observed == len(lengths)


@given(lengths=LENGTHS, window=st.integers(1, 20))
def test_a_restart_restores_the_window(lengths: list[int], window: int) -> None:
    d, again = LengthDistribution(100, window=window), LengthDistribution(100, window=window)
    observe_all(d, lengths)
    observe_all(again, d.recent().tolist())
    assert [v.tolist() for v in again.probabilities()] == [v.tolist() for v in d.probabilities()]


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40), q=st.floats(0, 1), generated=st.integers(0, 70))
def test_quantiles_are_those_of_what_is_longer(lengths: list[int], q: float, generated: int) -> None:
    beyond = [length for length in lengths if length > generated]
    position = q * len(beyond)
    if abs(position - round(position)) > 1e-6 or q == 0:
        expected = float(np.quantile(beyond, q, method="inverted_cdf")) if beyond else 1000
        assert filled(*lengths).quantile(q, generated) == expected


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    generated=st.lists(st.integers(0, 80), min_size=1, max_size=10),
    bound=st.integers(1, 90),
    seed=st.integers(0, 99),
)
def test_a_sample_is_longer_than_what_was_generated(
    lengths: list[int], generated: list[int], bound: int, seed: int
) -> None:
    d, rng = filled(*lengths), np.random.default_rng(seed)
    for sample, done in zip(d.sample_beyond(rng, generated, bound).tolist(), generated, strict=True):
        beyond = {min(length, bound) for length in lengths if length > done} or {bound}
        assert sample in {max(length, done + 1) for length in beyond}
    assert set(d.sample(rng, 5).tolist()) <= set(lengths)
    assert d.sample(rng, 5, bound).max() <= bound


def frequencies(samples: np.ndarray) -> dict[int, float]:
    values, counts = np.unique(samples, return_counts=True)
    return dict(zip(values.tolist(), (counts / len(samples)).tolist(), strict=True))


def test_samples_come_as_often_as_their_lengths() -> None:
    """Shares 1/2, 3/10, 1/5; 40,000 draws deviate by 0.01 once in 15,000 seeds."""
    d = filled(*([10] * 5 + [20] * 3 + [400] * 2))
    got = frequencies(d.sample(np.random.default_rng(1), 40_000))
    assert got == {
        10: pytest.approx(0.5, abs=0.01),
        20: pytest.approx(0.3, abs=0.01),
        400: pytest.approx(0.2, abs=0.01),
    }


@pytest.mark.parametrize(
    ("generated", "expected"),
    [(0, {10: 0.5, 20: 0.3, 400: 0.2}), (9, {10: 0.5, 20: 0.3, 400: 0.2}), (10, {20: 0.6, 400: 0.4}), (20, {400: 1})],
)
def test_running_requests_sample_from_what_is_longer(generated: int, expected: dict[int, float]) -> None:
    """P(l | l > 10) = (3/10, 2/10) / (5/10)."""
    d = filled(*([10] * 5 + [20] * 3 + [400] * 2))
    got = frequencies(d.sample_beyond(np.random.default_rng(2), np.full(40_000, generated)))
    assert got == {length: pytest.approx(share, abs=0.01) for length, share in expected.items()}


def test_a_request_that_outlived_the_window_gets_its_bound() -> None:
    d, rng = filled(5, 6, 7, start=2048), np.random.default_rng(0)
    assert d.sample_beyond(rng, [7, 100], [512, 90]).tolist() == [512, 101]
    assert d.sample_beyond(rng, [7, 4000]).tolist() == [2048, 4001]
    assert d.quantile(0.5, 7) == 2048


def test_before_anything_finished_everything_runs_to_its_bound() -> None:
    d = LengthDistribution(4096)
    assert d.sample(np.random.default_rng(0), 3).tolist() == [4096] * 3
    assert d.sample(np.random.default_rng(0), 3, [16, 5000, 1]).tolist() == [16, 4096, 1]
    assert len(d) == 500, "half a window"


def test_the_start_is_forgotten_with_a_full_window() -> None:
    d = LengthDistribution(4096, window=10)
    observe_all(d, [7] * 9)
    assert d.quantile(1) == 4096
    d.observe(7)
    assert d.quantile(1) == 7


def test_equal_seeds_give_equal_samples_and_every_call_draws_alike() -> None:
    a, b = filled(5, 9, 11), filled(1, 2, 3)
    one, two = np.random.default_rng(5), np.random.default_rng(5)
    assert a.sample(one, 20).tolist() == a.sample(two, 20).tolist()
    a.sample_beyond(one, [0, 1, 99])
    b.sample_beyond(two, [50, 1, 2])
    assert one.random() == two.random(), "what was in the window does not change what chance gives next"


def test_no_request_is_no_sample() -> None:
    rng = np.random.default_rng(0)
    assert filled(3).sample(rng, 0).shape == (0,)
    assert filled(3).sample_beyond(rng, np.zeros(0, np.int64)).shape == (0,)


def test_a_tag_is_believed_when_it_was_seen_enough() -> None:
    t = TaggedLengthDistributions(1000, window=50, min_observed=10)
    for _ in range(9):
        t.observe(3, "a")
    t.observe(500)
    assert t.of("a") is t.overall
    t.observe(3, "a")
    assert t.of("a") is not t.overall
    assert t.of("a").quantile(0.5) == 3
    assert t.of("b") is t.of(None) is t.overall
    assert t.overall.num_observed == 11, "tagged requests count for all"


def test_the_tag_that_finished_nothing_for_longest_goes() -> None:
    t = TaggedLengthDistributions(1000, max_tags=2, min_observed=1)
    for tag in ("a", "b", "a", "c"):
        t.observe(4, tag)
    assert len(t) == 2
    assert t.of("b") is t.overall
    assert t.of("a") is not t.overall


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start_tokens": 0}, "start_tokens=0"),
        ({"start_tokens": 9, "window": 0}, "window=0"),
        ({"start_tokens": 9, "window": 4, "start_size": 5}, "start_size=5: must be 1 to window=4"),
        ({"start_tokens": 9, "start_size": 0}, "start_size=0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LengthDistribution(**options)


def test_wrong_lengths_quantiles_and_tag_limits_are_refused() -> None:
    d = filled(5, 6)
    with pytest.raises(ValueError, match="length=0: must be at least 1 token"):
        d.observe(0)
    assert d.recent().tolist() == [5, 6]
    with pytest.raises(ValueError, match=r"q=1\.1"):
        d.quantile(1.1)
    with pytest.raises(ValueError, match="max_tags=0"):
        TaggedLengthDistributions(9, max_tags=0)
    with pytest.raises(ValueError, match="min_observed=11"):
        TaggedLengthDistributions(9, window=10, min_observed=11)
