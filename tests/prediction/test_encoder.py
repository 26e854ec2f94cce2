"""The prompt encoder: any text becomes a unit vector, offline, and only the window of a long text counts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.prediction import encoder
from vllm_ext.prediction.encoder import WINDOWS, Encoder, Window

ROOM = 30
"""Tokens of a text that an encoder of 32 tokens embeds: two are special."""


@pytest.fixture(scope="module", autouse=True)
def _process_is_left_as_it_was() -> Iterator[None]:
    threads, parallelism = torch.get_num_threads(), os.environ.get("TOKENIZERS_PARALLELISM")
    yield
    torch.set_num_threads(threads)
    os.environ.pop("TOKENIZERS_PARALLELISM", None)
    if parallelism is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = parallelism


@pytest.fixture(scope="module")
def default() -> Encoder:
    return Encoder(max_tokens=32, window="head", batch_size=4)


@pytest.fixture(scope="module")
def by_window() -> dict[Window, Encoder]:
    return {window: Encoder(max_tokens=32, window=window) for window in WINDOWS}


# --- vectors ----------------------------------------------------------------------------------------------------------


def test_vectors_are_unit_float32_in_the_order_of_the_texts(default: Encoder) -> None:
    texts = ["Write a poem about the sea.", "hi", "Prove that there are infinitely many primes. " * 3, "hi", "2 + 2 ="]
    vectors = default.encode(texts)
    assert vectors.shape == (5, default.dim) == (5, 384)
    assert vectors.dtype == np.float32
    assert vectors.flags.c_contiguous
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    for text, vector in zip(texts, vectors, strict=True):
        assert default.encode([text])[0] @ vector > 0.9999


def test_bfloat16_hardly_turns_a_vector_and_float32_hardly_depends_on_the_batch() -> None:
    texts = ["Write a poem about the sea.", "hi", "Prove that there are infinitely many primes. " * 9, "2 + 2 ="]
    exact, rough = (Encoder(precision=precision) for precision in ("float32", "bfloat16"))
    assert exact.name == rough.name, "what one stores the other finds"
    assert Encoder().precision == ("bfloat16" if _cpu_has_bfloat16() else "float32")
    vectors = exact.encode(texts)
    for text, vector, turned in zip(texts, vectors, rough.encode(texts), strict=True):
        np.testing.assert_allclose(exact.encode([text])[0], vector, atol=1e-5)
        assert turned @ vector > 0.9995
        assert np.linalg.norm(turned) == pytest.approx(1, abs=1e-5)


def _cpu_has_bfloat16() -> bool:
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(Path("/proc/cpuinfo").read_text().split()))


def test_like_questions_are_nearer_than_others(default: Encoder) -> None:
    poem, verse, sort = default.encode(
        ["Write a poem about the sea.", "Compose some verses on the ocean.", "Sort a list in Python."]
    )
    assert poem @ verse > 0.5 > poem @ sort


@pytest.mark.parametrize(("max_tokens", "lengths"), [(96, {32, 64, 96}), (40, {8, 16, 24, 32, 40})])
def test_batches_have_few_lengths_and_what_is_added_to_them_does_not_count(
    max_tokens: int, lengths: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of the predictor's process grew by 40 MB a minute: oneDNN keeps code for every shape that it has seen."""
    texts = [words(count, "word") for count in range(1, max_tokens)]
    padded = Encoder(max_tokens=max_tokens, precision="float32")
    seen: set[int] = set()
    padded._model[0].register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0]["input_ids"].shape[1]))
    vectors = np.concatenate([padded.encode([text]) for text in texts])
    assert seen == lengths
    monkeypatch.setattr(encoder, "_PAD_TO", 1)
    plain = Encoder(max_tokens=max_tokens, precision="float32")
    np.testing.assert_allclose(vectors, np.concatenate([plain.encode([text]) for text in texts]), atol=1e-5)


def test_no_texts_give_no_vectors(default: Encoder) -> None:
    assert default.encode([]).shape == (0, 384)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n\t ",
        "\0",
        "a\0b",
        "\ud800",
        "x" * 5000,
        "\udfff" * 9000,
        "日本語で詩を書いて",
        "اكتب قصيدة",
        "🧑‍🚀" * 40,
    ],
    ids=[
        "empty",
        "blank",
        "NUL",
        "NUL inside",
        "surrogate",
        "one word",
        "many surrogates",
        "Japanese",
        "Arabic",
        "emoji",
    ],
)
def test_odd_text_is_embedded(default: Encoder, text: str) -> None:
    vector = default.encode([text])[0]
    assert np.isfinite(vector).all()
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


def test_surrogate_pair_is_the_character_it_stands_for(default: Encoder) -> None:
    assert default.window_of("caf\u00e9 \ud83d\ude00") == "caf\u00e9 \U0001f600"


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.text(st.characters(exclude_categories=()), max_size=60), min_size=1, max_size=3))
def test_any_unicode_is_embedded_and_repeats_itself(default: Encoder, texts: list[str]) -> None:
    vectors = default.encode(texts)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors.tobytes() == default.encode(texts).tobytes()


@pytest.mark.parametrize("texts", ["one text", [b"bytes"], [None]], ids=["text", "bytes", "None"])
def test_what_is_no_list_of_texts_is_refused(default: Encoder, texts: Any) -> None:
    with pytest.raises(TypeError, match="texts: must"):
        default.encode(texts)


# --- window -----------------------------------------------------------------------------------------------------------


def words(count: int, word: str) -> str:
    """So many tokens: these words are one token each."""
    return " ".join([word] * count)


LONG = f"{words(100, 'apple')} {words(100, 'river')} {words(100, 'stone')}"


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ("head", words(ROOM, "apple")),
        ("tail", words(ROOM, "stone")),
        ("head+tail", f"{words(ROOM // 2, 'apple')}\n{words(ROOM // 2, 'stone')}"),
    ],
)
def test_window_of_a_long_text(by_window: dict[Window, Encoder], window: Window, expected: str) -> None:
    encoder = by_window[window]
    assert encoder.window_of(LONG) == expected
    np.testing.assert_allclose(encoder.encode([LONG]), encoder.encode([expected]), atol=1e-6)


def test_blanks_around_a_text_are_no_part_of_its_window(default: Encoder) -> None:
    assert default.window_of(" \n" * 9000 + "apple river" + "\t" * 9000) == "apple river"


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("count", [1, ROOM - 1, ROOM, ROOM + 1])
def test_window_begins_where_the_text_no_longer_fits(
    by_window: dict[Window, Encoder], window: Window, count: int
) -> None:
    encoder = by_window[window]
    kept = encoder.window_of(words(count, "apple"))
    assert len(kept.split()) == min(count, ROOM)
    assert ("\n" in kept) == (window == "head+tail" and count > ROOM)


@pytest.mark.parametrize("window", WINDOWS)
def test_long_text_is_cut_before_it_is_tokenised(
    by_window: dict[Window, Encoder], window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 100k tokens costs what one of a few hundred does."""
    encoder = by_window[window]
    real, seen = encoder._tokenizer, []

    def tokenizer(text: str, **options: Any) -> Any:
        seen.append(len(text))
        return real(text, **options)

    monkeypatch.setattr(encoder, "_tokenizer", tokenizer)
    text = f"{words(50_000, 'apple')} {words(50_000, 'stone')}"
    assert {"apple": 0, "stone": 0}.keys() >= set(encoder.window_of(text).split())
    assert seen
    assert max(seen) <= 32 * 16 + 1
    assert encoder.encode([text]).shape == (1, 384)
