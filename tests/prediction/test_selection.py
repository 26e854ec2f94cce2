"""What suits the traffic: whether the prompt's length helps, and how near a neighbour must be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vllm_ext.prediction import decoder_file
from vllm_ext.prediction.blend import Alise, Shrunk, strategy
from vllm_ext.prediction.decoder import LENGTH_FEATURE, Decoder, DecoderSpec
from vllm_ext.prediction.selection import WIDTHS, features_for, train_best

DIM = 8
OPTIONS: dict[str, Any] = {"hidden": (32,), "epochs": 30}


def unit(n: int, seed: int) -> np.ndarray:
    found = np.random.default_rng(seed).standard_normal((n, DIM))
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


def test_the_prompts_length_is_an_input_where_it_tells_the_answers() -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(5, 500, 400)
    decoder, report = train_best(unit(400, 0), 2 * tokens + 1, tokens, **OPTIONS)
    assert decoder.spec.features == (LENGTH_FEATURE,)
    assert report.skill > 0.5
    short, long = decoder.predict(unit(2, 9), features_for(decoder, [10, 400]))
    assert short.tokens < 100 < long.tokens


def test_it_is_none_where_it_tells_nothing() -> None:
    rng = np.random.default_rng(1)
    vectors = unit(400, 0)
    lengths = np.where(vectors[:, 0] > 0, 400, 20) + rng.integers(0, 5, 400)
    decoder, _ = train_best(vectors, lengths, rng.integers(5, 500, 400), **OPTIONS)
    assert decoder.spec.features == ()
    assert features_for(decoder, [10, 400]) is None


def test_it_is_not_tried_unless_it_is_known_of_all() -> None:
    tokens = np.random.default_rng(1).integers(5, 500, 400)
    lengths = 2 * tokens + 1
    tokens[7] = 0
    assert train_best(unit(400, 0), lengths, tokens, **OPTIONS)[0].spec.features == ()


def test_an_unknown_length_stands_for_the_usual_one() -> None:
    tokens = np.random.default_rng(1).integers(5, 500, 400)
    decoder, _ = train_best(unit(400, 0), 2 * tokens + 1, tokens, **OPTIONS)
    features = features_for(decoder, [0, 20])
    assert features is not None
    assert features[0] == decoder.tensors["feature_mean"]
    assert features[1] == pytest.approx(np.log(21))


def test_a_decoder_with_other_inputs_is_refused() -> None:
    spec = DecoderSpec(dim=2, hidden=(), features=("moon",))
    tensors = {name: np.ones(shape, np.float32) for name, shape in spec.shapes().items()}
    with pytest.raises(ValueError, match=r"features=\('moon',\)"):
        features_for(Decoder(spec, tensors), [1])


def twins(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts in pairs that are nearly equal and answered alike; a pair says nothing of any other."""
    rng = np.random.default_rng(3)
    first = unit(n // 2, 5)
    second = first + 0.1 * unit(n // 2, 6)
    second /= np.linalg.norm(second, axis=1, keepdims=True)
    lengths = np.exp(rng.normal(4, 1, n // 2)).astype(np.int64) + 1
    order = rng.permutation(n)
    return np.concatenate([first, second])[order].astype(np.float32), np.concatenate([lengths, lengths])[order]


def smooth(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Answers that change slowly with the prompt, and much by chance: many neighbours tell more than the nearest."""
    vectors = unit(n, 5)
    return vectors, np.exp(4 + 2 * vectors[:, 0] + np.random.default_rng(3).normal(0, 0.5, n)).astype(np.int64) + 1


def test_the_kernel_is_as_wide_as_neighbours_are_telling() -> None:
    unknown = np.zeros(1000, np.int64)
    few = {"hidden": (4,), "epochs": 1}  # a decoder that leaves something to the neighbours
    narrow, wide = (train_best(*made(1000), unknown, **few)[0].spec.kernel_width for made in (twins, smooth))
    assert narrow < wide
    assert {narrow, wide} <= set(WIDTHS)


def test_with_few_requests_nothing_is_chosen() -> None:
    tokens = np.arange(5, 65)
    decoder, _ = train_best(unit(60, 0), 2 * tokens, tokens, **OPTIONS)
    assert (decoder.spec.features, decoder.spec.kernel_width) == ((), Shrunk().width)


def test_the_same_seed_gives_the_same_choice_and_files_keep_it(tmp_path: Any) -> None:
    tokens = np.random.default_rng(1).integers(5, 500, 400)
    arguments = (unit(400, 0), 2 * tokens + 1, tokens)
    one, other = (train_best(*arguments, seed=4, **OPTIONS)[0] for _ in range(2))
    for decoder, name in ((one, "a"), (other, "b")):
        decoder_file.save(decoder, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert decoder_file.load(tmp_path / "a").spec == one.spec


@pytest.mark.parametrize("width", [0.0, -1.0, float("nan"), float("inf"), 10**400])
def test_a_width_that_is_none_is_refused(width: float) -> None:
    with pytest.raises(ValueError, match="kernel_width"):
        DecoderSpec(dim=2, kernel_width=width)


def test_only_the_strategy_with_a_kernel_takes_the_width() -> None:
    assert strategy("shrunk").suited(0.07) == Shrunk(width=0.07)
    assert strategy("alise").suited(0.07) == Alise()
