"""The predictor that comes with the package, on an encoder of the test's: what it learns it finds again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vllm_ext.prediction.service import predictor as module
from vllm_ext.prediction.service.predictor import FinishedPrompt, PromptPredictor, RetrievalPredictor

from .retrieval_parts import FakeEncoder, finish, lengths, prompt

Make = Callable[..., RetrievalPredictor]


def test_it_is_what_the_process_runs(make: Make) -> None:
    predictor: PromptPredictor = make()
    assert predictor.status() == {"entries": 0, "decoder_examples": 0}


def test_the_encoder_is_made_as_configured(make: Make) -> None:
    make(encoder="other", threads=2, prompt_tokens=64, prompt_window="tail", batch_size=5)
    assert FakeEncoder.made.options == {
        "model": "other", "threads": 2, "max_tokens": 64, "window": "tail", "batch_size": 5
    }  # fmt: skip


def test_an_empty_store_without_a_decoder_knows_nothing(make: Make) -> None:
    assert make().predict([prompt("tides"), prompt("tea")]) == [None, None]


def test_a_prompt_is_predicted_from_the_true_lengths_of_similar_ones(make: Make) -> None:
    predictor = make()
    finish(predictor, ("tides at noon", 100), ("taxes of 1950", 700))
    (tides, taxes, trains) = predictor.predict([prompt("tides at night"), prompt("taxes today"), prompt("trains")])
    assert lengths([tides, taxes, trains]) == [(100, 100, "retrieval"), (700, 700, "retrieval"), None]
    assert tides is not None
    assert tides.similarity > 0.9


def test_identical_prompts_with_different_lengths_are_averaged(make: Make) -> None:
    predictor = make()
    finish(predictor, *(("tea", tokens) for tokens in (10, 20, 30, 40, 100)))
    assert lengths(predictor.predict([prompt("tea")])) == [(40, 100, "retrieval")]
    assert predictor.status()["entries"] == 5


def test_a_prediction_keeps_to_the_clients_bound(make: Make) -> None:
    predictor = make()
    finish(predictor, ("tea", 500))
    bounds = [prompt("tea", bound) for bound in (1000, 499, 1)]
    assert lengths(predictor.predict(bounds)) == [
        (500, 500, "retrieval"), (499, 499, "retrieval"), (1, 1, "retrieval")
    ]  # fmt: skip


def test_each_model_has_lengths_of_its_own(make: Make) -> None:
    predictor = make()
    finish(predictor, ("tea", 10), model="terse")
    finish(predictor, ("tea", 900), model="verbose")
    asked = [prompt("tea", model=model) for model in ("terse", "verbose", "another", "")]
    assert lengths(predictor.predict(asked)) == [
        (10, 10, "retrieval"), (900, 900, "retrieval"), None, (455, 900, "retrieval")
    ]  # fmt: skip


def test_only_so_many_neighbours_are_looked_at(make: Make) -> None:
    predictor = make(neighbours=2)
    finish(predictor, ("tea", 30), *((f"tea {i}", 900) for i in range(5)), ("tea", 10))
    assert lengths(predictor.predict([prompt("tea")])) == [(20, 30, "retrieval")]


# --- embeddings -------------------------------------------------------------------------------------------------------


def test_a_text_is_embedded_once(make: Make) -> None:
    predictor = make()
    predictor.predict([prompt("tea"), prompt("taxes"), prompt("tea", 5)])
    predictor.predict([prompt("tea"), prompt("trains")])
    predictor.learn([FinishedPrompt(prompt("tea"), 10, 1.0)])
    predictor.predict([prompt("tea")])
    assert FakeEncoder.made.batches == [["tea", "taxes"], ["trains"]]


def test_embeddings_are_forgotten_beyond_a_bound_least_recently_used_first(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_VECTORS_KEPT", 3)
    predictor = make()
    for text in ("tea 0", "tea 1", "tea 2", "tea 0", "tea 3"):
        predictor.predict([prompt(text)])
    FakeEncoder.made.batches.clear()
    predictor.predict([prompt("tea 0"), prompt("tea 1")])
    assert FakeEncoder.made.batches == [["tea 1"]]


def test_a_batch_larger_than_the_bound_is_predicted_whole(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_VECTORS_KEPT", 2)
    predictor = make()
    finish(predictor, ("tea", 10), ("taxes", 20))
    asked = [prompt(text) for text in ("tea", "taxes", "trains", "tea", "tides")]
    assert lengths(predictor.predict(asked)) == [
        (10, 10, "retrieval"), (20, 20, "retrieval"), None, (10, 10, "retrieval"), None
    ]  # fmt: skip


def test_a_kept_embedding_does_not_keep_its_batch(make: Make) -> None:
    """Rows of one array hold all of it: popular prompts would each have kept the batch they came with."""
    predictor = make()
    predictor.predict([prompt(f"tea {i}") for i in range(16)])
    assert all(vector.base is None for vector in predictor._vectors.values())


def test_what_finished_before_it_was_embedded_is_embedded_to_be_learned(make: Make) -> None:
    """Under load the short ones do; without them, everything would seem long."""
    predictor = make()
    predictor.learn([FinishedPrompt(prompt(text), 10, 1.0) for text in ("tea", "taxes", "tea")])
    predictor.learn([])
    assert predictor.status()["entries"] == 3
    assert FakeEncoder.made.batches == [["tea", "taxes"]]
    assert lengths(predictor.predict([prompt("tea")])) == [(10, 10, "retrieval")]


def test_of_many_that_finished_before_a_batch_evenly_chosen_is_learned(make: Make) -> None:
    predictor = make(batch_size=4)
    predictor.learn([FinishedPrompt(prompt(f"tea {i}"), 10 + i, 1.0) for i in range(10)])
    assert FakeEncoder.made.batches == [["tea 0", "tea 3", "tea 6", "tea 9"]]
    assert predictor.status()["entries"] == 4


def test_odd_texts_are_told_apart(make: Make) -> None:
    predictor = make()
    texts = ["tea \ud800", "tea ?", "tea \0", "tea", "tea  "]
    finish(predictor, *((text, 10 + i) for i, text in enumerate(texts)))
    assert predictor.status()["entries"] == len(texts)
    assert FakeEncoder.made.batches == [texts]
