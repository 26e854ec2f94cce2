"""Sequences cut from texts."""

from __future__ import annotations

import pytest
import torch

from vllm_ext.quality.texts import TooLittleText, sequences, spread, windows


def encode(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def numbers(start: int, count: int) -> str:
    return " ".join(map(str, range(start, start + count)))


def test_no_sequence_holds_parts_of_two_texts() -> None:
    texts = [*(numbers(1000 * n, 25) for n in range(6)), numbers(0, 9)]
    found = sequences(texts, encode, tokens=10, count=12, seed=0)
    assert found.rows.shape == (12, 10)
    assert (found.rows // 1000 == found.rows[:, :1] // 1000).all()
    assert sorted(found.rows[:, 0].tolist()) == sorted(1000 * n + start for n in range(6) for start in (0, 10))
    assert (found.texts, found.too_short) == (6, 1)


def test_no_more_texts_are_read_than_sequences_are_wanted() -> None:
    read: list[str] = []

    def noted(text: str) -> list[int]:
        read.append(text)
        return encode(text)

    found = sequences([numbers(n, 10) for n in range(100)], noted, tokens=10, count=8, seed=3)
    assert (len(read), found.texts) == (8, 8)
    again = sequences([numbers(n, 10) for n in range(100)], encode, tokens=10, count=8, seed=3)
    assert torch.equal(found.rows, again.rows)


def test_one_long_text_is_sampled_from_end_to_end() -> None:
    found = sequences([numbers(0, 1000)], encode, tokens=10, count=8, seed=0).rows
    assert (found[0, 0], found[-1, -1], len(found)) == (0, 999, 8)


@pytest.mark.parametrize("texts", [[], ["1 2 3"] * 50, [numbers(0, 79)]], ids=["none", "short", "few"])
def test_too_little_text_says_how_much_is_needed(texts: list[str]) -> None:
    with pytest.raises(TooLittleText, match=r"sequences of 10 tokens: at least 8 are needed"):
        sequences(texts, encode, tokens=10, count=64, seed=0)


def test_windows_and_spread() -> None:
    rows = windows(torch.arange(11), 2)
    assert rows.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert spread(rows, 3)[:, 0].tolist() == [0, 4, 8]
    assert torch.equal(spread(rows, 9), rows)
