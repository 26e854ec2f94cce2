"""Choices that depend on what is served, made by held-out requests whenever the decoder is trained.

Two of them. Does the prompt's length help? Where answers repeat the question's numbers (gsm8k) it tells more than the
embedding; where it says nothing, a decoder that has it learns it by heart. And how near must a past prompt be to tell
anything? With wide-ranging chats even a distant neighbour helps, in narrow traffic only an almost equal one does: the
width of `blend.Shrunk`'s kernel. An identical prompt counts 1 whatever the width.

Chosen is what has the least pinball loss on held-out prompts, which also stop the training and calibrate P90. Ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_ext.prediction.blend import Shrunk
from vllm_ext.prediction.decoder import LENGTH_FEATURE, LONGEST_TOKENS, Decoder, Floats
from vllm_ext.prediction.decoder_train import TrainingReport, held_out, pinball, train
from vllm_ext.prediction.vector_store import VectorStore

WIDTHS = (0.05, 0.1, 0.15, 0.2, 0.3)
"""Widths tried."""
_FEWEST_HELD = 50
"""Held-out requests below which a choice would be chance."""
_MOST_HELD = 1000
_FEATURE_GAIN = 0.03
"""Share by which the prompt's length must lower the loss to be worth an input."""

Ints = npt.NDArray[np.int64]


def features_for(decoder: Decoder, prompt_tokens: npt.ArrayLike) -> Floats | None:
    """Return what a decoder wants to know beside the embedding, [n, features]; None if that is nothing.

    Args:
        decoder: Trained by `train_best`.
        prompt_tokens: [n] lengths of prompts in tokens; 0 where unknown, which stands for the usual.

    Raises:
        ValueError: it wants something that is not known here.
    """
    if not decoder.spec.features:
        return None
    if decoder.spec.features != (LENGTH_FEATURE,):
        raise ValueError(f"features={decoder.spec.features!r}: must be none, or {LENGTH_FEATURE!r}")
    tokens = np.asarray(prompt_tokens)
    found = _features(tokens)
    found[tokens < 1] = decoder.tensors["feature_mean"]
    return found


def train_best(
    vectors: Floats,
    lengths: Ints,
    prompt_tokens: Ints,
    *,
    neighbours: int = 10,
    judged: npt.NDArray[np.bool_] | None = None,
    seed: int = 0,
    **options: Any,
) -> tuple[Decoder, TrainingReport]:
    """Train a decoder with and without the prompt's length, keep the better, and choose the kernel's width.

    Args:
        vectors: [n, dim], L2-normalised.
        lengths: [n], output tokens.
        prompt_tokens: [n]; 0 where unknown. If any is, the length is not tried.
        neighbours: Similar prompts looked at.
        judged: As of `decoder_train.train`; these choose the width, too.
        seed: As of `decoder_train.train`.
        options: The others of `decoder_train.train`.

    Returns:
        The decoder, whose ``spec.kernel_width`` is the width, and how it was trained.

    Raises:
        ValueError: as of `decoder_train.train`.
    """
    decoder, report = train(vectors, lengths, judged=judged, seed=seed, **options)
    if (prompt_tokens > 0).all() and report.num_validation >= _FEWEST_HELD:
        told = train(
            vectors, lengths, features=_features(prompt_tokens), feature_names=(LENGTH_FEATURE,), seed=seed, **options
        )
        if told[1].validation_loss < (1 - _FEATURE_GAIN) * report.validation_loss:
            decoder, report = told
    held = judged
    if held is None:
        held = held_out(vectors, seed=seed, validation_share=options.get("validation_share", 0.15))
    width = _best_width(decoder, vectors, lengths, prompt_tokens, held, neighbours)
    return Decoder(replace(decoder.spec, kernel_width=width), decoder.tensors), report


def _best_width(
    decoder: Decoder, vectors: Floats, lengths: Ints, prompt_tokens: Ints, held: npt.NDArray[np.bool_], neighbours: int
) -> float:
    tested = np.flatnonzero(held)[:_MOST_HELD]
    if len(tested) < _FEWEST_HELD:
        return Shrunk().width
    known = ~held
    # An exact scan: this is no server, and an index would take longer to build than to be of use.
    store = VectorStore(vectors.shape[1], capacity=max(int(known.sum()), 1), index="flat")
    store.add(vectors[known], lengths[known])
    near = store.search(vectors[tested], neighbours, min_similarity=0.0)
    decoded = decoder.predict(vectors[tested], features_for(decoder, prompt_tokens[tested]))
    truth = np.log(lengths[tested])

    def loss(width: float) -> float:
        rule = Shrunk(width=width)
        said = [rule.combine(n, guess, LONGEST_TOKENS) for n, guess in zip(near, decoded, strict=True)]
        return pinball(np.log([(e.tokens, e.p90) for e in said if e is not None]), truth)

    return min(WIDTHS, key=loss)


def _features(prompt_tokens: npt.NDArray[Any]) -> Floats:
    found: Floats = np.log1p(prompt_tokens.astype(np.float64))[:, None].astype(np.float32)
    return found
