"""Our combination on a tuned encoder, on a random transformer of two layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.prediction.tiny_transformer import LAYERS, one_thread, write
from vllm_ext.prediction.encoder import Encoder
from vllm_ext.prediction.evaluation.compare import READING_TEXTS, Setting, predictors
from vllm_ext.prediction.evaluation.latency import call_of
from vllm_ext.prediction.evaluation.measures import Deciles, score
from vllm_ext.prediction.evaluation.rows import EvaluationError
from vllm_ext.prediction.evaluation.tuned import TUNED, Tuned, TunedWhole, shortened
from vllm_ext.prediction.tuning_options import TuningOptions

from .made_up import requests

FAST = TuningOptions(epochs=20, patience=20, learning_rate=3e-3, head_learning_rate=1e-2)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def encoder(tiny: str) -> Encoder:
    return Encoder(tiny, max_tokens=32)


@pytest.mark.parametrize(("kind", "layers"), [(Tuned, 1), (TunedWhole, LAYERS)])
def test_it_learns_from_texts_whatever_their_embeddings_are(
    kind: type[Tuned], layers: int, encoder: Encoder, tiny: str
) -> None:
    train, test = requests(240), requests(80, seed=1)
    blind = replace(test.prompts, vectors=np.zeros((len(test), 0), np.float32))
    predictor = kind(encoder, model=tiny, options=FAST)
    predictor.fit(train)
    said = predictor.predict(blind)
    found = score(said, test.lengths, Deciles(train.lengths))
    assert found["tau"] > 0.5
    assert found["coverage_p90"] > 0.7
    assert predictor.report is not None
    assert predictor.report.layers == layers


def test_the_same_seed_says_the_same(encoder: Encoder, tiny: str) -> None:
    train, test = requests(120), requests(10, seed=1)
    runs = []
    for _ in range(2):
        predictor = Tuned(encoder, model=tiny, options=replace(FAST, epochs=2))
        predictor.fit(train)
        runs.append(predictor.predict(test.prompts).tokens.tolist())
    assert runs[0] == runs[1]


def test_too_few_to_tune_on_are_learned_with_the_encoder_as_it_is(encoder: Encoder, tiny: str) -> None:
    predictor = Tuned(encoder, model=tiny, options=FAST)
    with pytest.raises(EvaluationError, match="fit comes before predict"):
        predictor.predict(requests(1).prompts)
    predictor.fit(requests(60))
    assert predictor.report is None
    assert len(predictor.predict(requests(5, seed=1).prompts).tokens) == 5


def test_they_are_built_by_name_and_timed_with_their_own_encoder(encoder: Encoder, tiny: str) -> None:
    assert set(TUNED) < set(READING_TEXTS)
    built = predictors(list(TUNED), Setting(encoder=encoder, model=tiny))
    assert [type(predictor) for predictor in built] == [Tuned, TunedWhole]
    predictor = Tuned(encoder, model=tiny, options=FAST)
    predictor.fit(requests(120))
    before = encoder.encode
    try:
        encoder.encode = None  # type: ignore[assignment,method-assign]  # nobody may ask the general one
        assert call_of(predictor, encoder)(["yes about 1", "book about 2"]) is not None
    finally:
        encoder.encode = before  # type: ignore[method-assign]


def test_half_of_an_encoder_gives_other_vectors_of_the_same_width(tiny: str) -> None:
    encoder = Encoder(tiny, max_tokens=32, precision="float32")
    short = shortened(encoder, tiny)
    assert (short.dim, short.precision, short.max_tokens) == (encoder.dim, "float32", 32)
    texts = ["yes about 1", "book about 2"]
    assert not np.allclose(short.encode(texts), encoder.encode(texts), atol=1e-4)
