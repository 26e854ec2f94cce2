"""Training of the decoder: learns a known law, is no worse than a constant without one, and repeats its bytes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vllm_ext.prediction.decoder import Decoder, DecoderSpec
from vllm_ext.prediction.decoder_descent import Epoch, initial_weights
from vllm_ext.prediction.decoder_file import save
from vllm_ext.prediction.decoder_train import TrainingReport, pinball, train

DIM = 16
SIGMA = 0.4
Z90 = 1.2815515655446004


def embeddings(n: int, seed: int) -> Any:
    v = np.random.default_rng(seed).standard_normal((n, DIM))
    return (v / np.linalg.norm(v, axis=1, keepdims=True)).astype(np.float32)


def log_median(x: Any) -> Any:
    """The law: log lengths are normal around a bent function of the embedding, with deviation SIGMA."""
    return 5 + 3 * x[:, 0] + 2 * np.abs(x[:, 1])


def examples(n: int, seed: int) -> tuple[Any, Any]:
    x = embeddings(n, seed)
    noise = SIGMA * np.random.default_rng(seed + 1000).standard_normal(n)
    return x, np.maximum(np.rint(np.exp(log_median(x) + noise)), 1).astype(np.int64)


def small(x: Any, y: Any, **options: Any) -> tuple[Decoder, TrainingReport]:
    return train(x, y, **{"hidden": (32,), "epochs": 4, "patience": 4, **options})


@pytest.fixture(scope="module")
def learnt() -> tuple[Decoder, TrainingReport]:
    return train(*examples(3000, 1), hidden=(64, 32), epochs=40, seed=1)


def test_it_learns_the_law(learnt: tuple[Decoder, TrainingReport]) -> None:
    decoder, report = learnt
    x, lengths = examples(2000, 2)
    quantiles = decoder.log_quantiles(x)
    # Mean error in nats, measured: a constant 0.65; this 0.20 after 1000 examples, 0.14 after 3000, 0.08 after 12,000.
    quarter = np.abs(log_median(x) - np.median(log_median(x))).mean() / 4
    assert np.abs(quantiles[:, 0] - log_median(x)).mean() < quarter
    assert np.abs(quantiles[:, 1] - log_median(x) - Z90 * SIGMA).mean() < quarter
    assert (np.log(lengths) <= quantiles[:, 1]).mean() == pytest.approx(0.9, abs=0.03)
    assert report.skill > 0.4
    assert decoder.spec.skill == report.skill
    assert decoder.spec.p90_coverage == report.p90_coverage


def test_the_report_says_how_it_went(learnt: tuple[Decoder, TrainingReport]) -> None:
    decoder, report = learnt
    assert (report.seed, report.num_train + report.num_validation, report.num_validation) == (1, 3000, 450)
    assert report.num_duplicates == 0
    assert 1 <= report.best_epoch <= report.epochs <= 40
    assert report.validation_loss < report.constant_loss
    assert report.p90_coverage == pytest.approx(0.9, abs=0.01), "calibrated on these examples"
    assert 0.1 < report.median_relative_error < 0.5
    assert decoder.spec.num_examples == 3000


def test_noise_is_predicted_by_constants() -> None:
    """Nothing to learn: the training stops early and the estimates are about the lengths' own quantiles."""
    lengths = np.random.default_rng(3).integers(50, 500, 600)
    decoder, report = small(embeddings(600, 3), lengths, epochs=30, patience=3)
    assert report.stopped_early
    assert report.epochs == report.best_epoch + 3
    assert report.skill == pytest.approx(0, abs=0.05)
    p50 = np.array([e.tokens for e in decoder.predict(embeddings(200, 4))])
    assert np.median(p50) == pytest.approx(np.median(lengths), rel=0.25)


def test_features_are_used_and_standardised() -> None:
    x, rng = embeddings(800, 5), np.random.default_rng(5)
    prompt_tokens = rng.uniform(1e4, 2e4, (800, 1))
    lengths = np.rint(prompt_tokens[:, 0] / 100).astype(np.int64)
    decoder, report = small(x, lengths, features=prompt_tokens, feature_names=("prompt_tokens",), epochs=60)
    assert decoder.spec.features == ("prompt_tokens",)
    assert report.skill > 0.7
    low, high = decoder.predict(x[:2], [[1.1e4], [1.9e4]])
    assert low.tokens < high.tokens


def test_no_estimate_is_outside_what_was_learnt_from() -> None:
    x, lengths = examples(200, 6)
    decoder, _ = small(x, np.clip(lengths, 50, 300))
    odd = np.eye(DIM, dtype=np.float32)
    assert all(50 <= e.tokens <= e.p90 <= 300 for e in decoder.predict(np.concatenate((odd, -odd))))


@pytest.mark.parametrize("length", [1, 77])
def test_equal_lengths_are_learnt(length: int) -> None:
    decoder, report = small(embeddings(60, 7), np.full(60, length))
    assert {e[:2] for e in decoder.predict(embeddings(9, 8))} == {(length, length)}
    assert math.isfinite(report.skill)


def test_examples_of_one_prompt_stay_together() -> None:
    """Each prompt is there four times; were it on both sides, the network would know what it is tested on."""
    x = np.repeat(embeddings(200, 9), 4, axis=0)
    lengths = np.repeat(np.random.default_rng(9).integers(5, 5000, 200), 4)
    _, report = small(x, lengths, hidden=(256,), epochs=40, patience=40, weight_decay=0.0)
    assert report.num_duplicates == 600
    assert report.num_validation == 4 * 30
    assert report.skill < 0.1, "nothing can be known of a prompt that was held out"


def test_who_judges_calibrates_p90_and_is_what_the_report_is_of() -> None:
    """Lengths of the judged are noisier, as those of prompts that an encoder was not tuned on are."""
    x, lengths = examples(1000, 5)
    judged = np.zeros(1000, dtype=bool)
    judged[:200] = True
    noise = np.random.default_rng(6).standard_normal(1000)
    lengths = np.where(judged, np.maximum(np.exp(np.log(lengths) + noise), 1), lengths).astype(np.int64)
    usual, usual_report = small(x, lengths, epochs=20)
    decoder, report = small(x, lengths, epochs=20, judged=judged)
    assert report.num_validation == 200
    assert report.p90_coverage == pytest.approx(0.9, abs=0.01)
    assert (np.log(lengths[judged]) <= decoder.log_quantiles(x[judged])[:, 1] + 1e-6).mean() == report.p90_coverage
    assert (decoder.log_quantiles(x)[:, 1] > usual.log_quantiles(x)[:, 1]).all(), "wider, for all of them"
    np.testing.assert_array_equal(decoder.log_quantiles(x)[:, 0], usual.log_quantiles(x)[:, 0])
    assert report.skill < usual_report.skill


def test_equal_seeds_give_equal_bytes_and_others_do_not(tmp_path: Path) -> None:
    x, lengths = examples(300, 10)
    state = torch.random.get_rng_state()
    numpy_state = np.random.get_state()
    for name, seed in (("a", 4), ("b", 4), ("c", 5)):
        np.random.seed(1 if name == "a" else 2)
        torch.manual_seed(1 if name == "a" else 2)
        save(small(x, lengths, seed=seed)[0], tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()
    torch.random.set_rng_state(state)
    np.random.set_state(numpy_state)


def test_global_states_are_left_alone() -> None:
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    small(*examples(60, 11), threads=threads + 1)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), state)


def test_progress_is_told_and_an_error_in_it_is_passed_on() -> None:
    seen: list[Epoch] = []
    _, report = small(*examples(100, 12), on_epoch=seen.append)
    assert [e.number for e in seen] == list(range(1, report.epochs + 1))
    assert seen[report.best_epoch - 1].validation_loss == report.validation_loss

    def stop(_: Epoch) -> None:
        raise KeyboardInterrupt

    before = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        small(*examples(100, 12), on_epoch=stop)
    assert torch.get_num_threads() == before


def test_divergence_is_an_error_not_a_decoder() -> None:
    with pytest.raises(ValueError, match=r"learning_rate=1e\+30: training diverged in epoch 1"):
        small(*examples(100, 13), learning_rate=1e30)


def test_untrained_weights_predict_constants() -> None:
    spec = DecoderSpec(dim=DIM, hidden=(8, 4))
    weights = initial_weights(spec, np.log(np.array([100, 400], np.float32)), np.random.default_rng(0))
    none = np.zeros(0, np.float32)
    decoder = Decoder(spec, {"feature_mean": none, "feature_scale": none, **weights})
    assert {e.tokens for e in decoder.predict(embeddings(20, 14))} == {100}
    assert np.exp(decoder.log_quantiles(embeddings(20, 14))[:, 1]) == pytest.approx(400, rel=1e-4)


def test_the_pinball_loss_by_hand() -> None:
    """P50 misses by +2 and -1: 1, 0.5. P90 misses by +1 and -2: 0.9, 0.2. Mean of 1.9 and 0.7."""
    assert pinball(np.array([[0.0, 1.0], [3.0, 4.0]]), np.array([2.0, 2.0])) == pytest.approx(1.3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"patience": 0}, "patience=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"threads": 0}, "threads=0"),
        ({"validation_share": 1.0}, "validation_share=1.0"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"weight_decay": math.nan}, "weight_decay=nan"),
        ({"features": np.zeros((30, 2))}, r"features: shape \[30, 2\], must be \[30, 0\]"),
        ({"hidden": (0,)}, "hidden=0"),
        ({"judged": np.zeros(30, dtype=bool)}, r"judged: must be \[30\] bool, some of them true"),
        ({"judged": np.ones(29, dtype=bool)}, "judged: must be"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(*examples(30, 15), **options)


@pytest.mark.parametrize(
    ("x", "lengths", "message"),
    [
        (embeddings(19, 16), np.full(19, 5), "n at least 20"),
        (embeddings(30, 16), np.full(29, 5), r"embeddings: shape \[30, 16\], must be \[29, dim\]"),
        (embeddings(30, 16), np.full(30, 0), "whole tokens of 1 to"),
        (embeddings(30, 16), np.full(30, 5.5), "whole tokens"),
        (np.repeat(embeddings(5, 16), 6, axis=0), np.full(30, 5), "5 different ones, at least 20"),
        (embeddings(30, 16) * 3, np.full(30, 5), "L2-normalised"),
        (np.full((30, 4), np.nan), np.full(30, 5), "embeddings"),
    ],
)
def test_wrong_examples_are_refused(x: Any, lengths: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(x, lengths)
