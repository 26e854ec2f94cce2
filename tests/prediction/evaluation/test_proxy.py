"""Fine-tuned proxies, on a random transformer of one layer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.prediction.tiny_transformer import one_thread, write
from vllm_ext.prediction.evaluation.measures import NUM_CLASSES, Deciles, score
from vllm_ext.prediction.evaluation.proxy import PROXIES, Proxy, ProxyClassifier, ProxyRegressor
from vllm_ext.prediction.evaluation.rows import EvaluationError, Examples
from vllm_ext.prediction.fine_tuning import LengthTransformer, TuningError
from vllm_ext.prediction.tuning_options import TuningOptions

from .made_up import requests

FAST = TuningOptions(epochs=20, patience=20, learning_rate=3e-3, head_learning_rate=1e-2)
ENCODER: Any = SimpleNamespace(window_of=lambda text: text)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("models") / "tiny", layers=1)


def made(kind: type[Proxy], tiny: str, options: TuningOptions = FAST) -> Proxy:
    return kind(ENCODER, model=tiny, options=options)


@pytest.mark.parametrize("kind", PROXIES.values(), ids=PROXIES)
def test_it_learns_that_a_word_says_how_long_the_answer_is(kind: type[Proxy], tiny: str) -> None:
    train, test = requests(240), requests(80, seed=1)
    proxy = made(kind, tiny)
    proxy.fit(train)
    said = proxy.predict(test.prompts)
    found = score(said, test.lengths, Deciles(train.lengths))
    assert found["tau"] > 0.3
    assert found["coverage_p90"] > 0.7
    assert (said.p90 >= said.tokens).all()
    assert proxy.report is not None
    assert proxy.report.validation_losses[proxy.report.best_epoch] == min(proxy.report.validation_losses)
    assert proxy.report.best_epoch > 0


@pytest.mark.parametrize("kind", PROXIES.values(), ids=PROXIES)
def test_the_same_seed_gives_the_same_predictions_and_leaves_torch_alone(kind: type[Proxy], tiny: str) -> None:
    train, test = requests(40), requests(10, seed=1)
    state = torch.random.get_rng_state()
    runs = []
    for _ in range(2):
        proxy = made(kind, tiny, TuningOptions(epochs=1))
        proxy.fit(train)
        runs.append(proxy.predict(test.prompts).tokens.tolist())
    assert runs[0] == runs[1]
    assert torch.equal(state, torch.random.get_rng_state())


def test_classes_are_read_as_quantiles_of_their_probabilities(tiny: str) -> None:
    proxy = ProxyClassifier(ENCODER, model=tiny)
    proxy._log_ends = np.log(np.geomspace(1, 1024, NUM_CLASSES + 1))  # 1, 2, 4, ..., 1024
    outputs = np.full((2, NUM_CLASSES), -50.0)
    outputs[0, 3] = 50  # surely 8 to 16
    outputs[1, [0, 9]] = np.log([0.6, 0.4])  # 1 to 2, or 512 to 1024
    said = proxy._read(outputs)
    assert said.tokens.tolist() == [11, 2]  # 8 * 2^0.5; 2^(5/6)
    assert said.p90.tolist() == [15, 862]  # 8 * 2^0.9; 512 * 2^(3/4), rounded up
    assert said.classes is not None
    assert said.classes.tolist()[0] == 3


def test_regressor_covers_nine_in_ten_of_what_it_was_calibrated_on(tiny: str) -> None:
    held = requests(200)
    proxy = ProxyRegressor(ENCODER, model=tiny)
    proxy._targets(held)
    proxy._calibrate(np.zeros((200, 1)), held)
    said = proxy._read(np.zeros((200, 1)))
    assert (held.lengths <= said.p90).mean() == pytest.approx(0.9, abs=0.02)


def test_it_stops_when_held_out_loss_gets_no_better(tiny: str) -> None:
    noise = requests(60)
    rng = np.random.default_rng(5)
    shuffled = Examples(prompts=noise.prompts, lengths=rng.permutation(noise.lengths))
    proxy = made(ProxyRegressor, tiny, TuningOptions(epochs=40, patience=2, learning_rate=1e-2))
    proxy.fit(shuffled)
    assert proxy.report is not None
    assert proxy.report.epochs == min(40, proxy.report.best_epoch + 2)
    assert proxy.report.epochs < 40


def test_an_untrained_one_predicts_for_latency(tiny: str) -> None:
    for kind in PROXIES.values():
        proxy = made(kind, tiny)
        proxy.untrained()
        assert len(proxy.predict(requests(5).prompts).tokens) == 5


def test_batches_hold_every_row_once(tiny: str) -> None:
    seen: list[int] = []
    model = LengthTransformer(lambda text: text, 1, model=tiny, seed=0)
    rows = np.arange(3, 40)

    def loss(outputs: Any, targets: Any) -> Any:
        seen.extend(int(t) for t in targets)
        return outputs.mean()

    texts = [f"word {'x ' * (i % 7)}" for i in range(40)]
    targets = np.arange(40, dtype=np.float32)
    model.tune(texts, targets, fitted=rows, held=np.arange(3), loss=loss, options=TuningOptions(epochs=1, batch_size=4))
    assert sorted(seen) == sorted([*rows.tolist(), *([0, 1, 2] * 2)])  # held-out loss before and after


@pytest.mark.parametrize("kind", PROXIES.values(), ids=PROXIES)
def test_too_few_examples_and_no_fit_are_errors(kind: type[Proxy], tiny: str) -> None:
    with pytest.raises(EvaluationError, match="at least 20 are needed"):
        made(kind, tiny).fit(requests(19))
    with pytest.raises(EvaluationError, match="fit comes before predict"):
        made(kind, tiny).predict(requests(1).prompts)


def test_a_model_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TuningError, match="cannot be read as a transformer"):
        made(ProxyClassifier, str(tmp_path)).untrained()


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"learning_rate": 0.0}, {"warmup_share": 2.0}])
def test_options_out_of_range_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TuningOptions(**wrong)
