"""Training of the decoder: pinball loss on the log length, early stopping, and a P90 that is calibrated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_ext.prediction.decoder import LONGEST_TOKENS, Decoder, DecoderSpec, Floats, inputs
from vllm_ext.prediction.decoder_descent import P90, DescentOptions, Epoch, descend, initial_weights

MIN_EXAMPLES = 20
_MIN_CALIBRATION = 50
_SMALLEST_SCALE = 1e-3


@dataclass(frozen=True, kw_only=True)
class TrainingReport:
    """How a decoder was trained. Losses as of `Epoch`."""

    seed: int
    num_train: int
    num_validation: int
    """Examples held out (or ``judged``), to calibrate P90 and to measure."""
    num_duplicates: int
    """Examples whose prompt occurred before; all examples of a prompt are on one side of the split."""
    epochs: int
    """Epochs run."""
    best_epoch: int
    """Epoch whose weights were kept; 0 are the untrained ones, which predict constants."""
    stopped_early: bool
    train_loss: float
    """At the best epoch."""
    validation_loss: float
    """At the best epoch, before calibration."""
    constant_loss: float
    """Loss on the held-out examples of the training examples' P50 and P90, the same for every prompt."""
    p90_coverage: float
    """Share of the held-out examples within P90 after calibration; about 0.9 by construction, as these calibrate it."""
    median_relative_error: float
    """Median of |P50 - length| / length on the held-out examples."""

    @property
    def skill(self) -> float:
        """1 - validation loss / constant loss: 0 or below is no better than a constant."""
        return 1 - self.validation_loss / self.constant_loss if self.constant_loss > 0 else 0.0


def train(
    embeddings: npt.ArrayLike,
    lengths: npt.ArrayLike,
    *,
    features: npt.ArrayLike | None = None,
    feature_names: tuple[str, ...] = (),
    hidden: tuple[int, ...] = (512, 256),
    encoder: str = "",
    seed: int = 0,
    epochs: int = 60,
    patience: int = 6,
    validation_share: float = 0.15,
    judged: npt.NDArray[np.bool_] | None = None,
    batch_size: int = 64,
    learning_rate: float = 1e-3,
    weight_decay: float = 0.5,
    threads: int = 1,
    on_epoch: Callable[[Epoch], None] | None = None,
) -> tuple[Decoder, TrainingReport]:
    """Train a decoder. Equal arguments and threads give equal bytes; global random states are left alone.

    Args:
        embeddings: [n, dim], L2-normalised, n >= 20.
        lengths: True output lengths in whole tokens, [n].
        features: Further inputs [n, f], as they are: they are standardised here.
        feature_names: Their f names.
        hidden: Widths of the hidden layers.
        encoder: Name of the encoder of the embeddings.
        seed: Of initial weights, split and order.
        epochs: At most, at least 1.
        patience: Epochs without a better validation loss before it stops, at least 1.
        validation_share: Share of the prompts held out, above 0 and below 1.
        judged: [n], examples that calibrate P90 and that the report is of, instead of those held out: where the encoder
            was tuned, those it was not tuned on. The embeddings of the others know their lengths, and by them nothing
            seems as uncertain as it is.
        batch_size: Examples per update, at least 1.
        learning_rate: Of AdamW, above 0.
        weight_decay: Of AdamW, at least 0.
        threads: Of torch while this runs; set back afterwards. Other threads of the process see them too.
        on_epoch: Called after each epoch. What it raises ends the training and is passed on.

    Raises:
        ValueError: an argument is out of its range, or training diverged to what is not finite.

    Source: ALISE, section 3.1 ("all-MLP decoder fine-tuned for regression tasks"). Pinball loss: Koenker and Bassett,
    1978. Calibration of P90 on held-out examples: conformalised quantile regression, Romano et al., 2019.
    """
    options = DescentOptions(
        epochs=epochs, patience=patience, batch_size=batch_size, learning_rate=learning_rate,
        weight_decay=weight_decay, threads=threads,
    )  # fmt: skip
    if not 0 < validation_share < 1:
        raise ValueError(f"validation_share={validation_share!r}: must be above 0 and below 1")
    y = _log_lengths(lengths)
    raw = np.zeros((len(y), 0), np.float32) if features is None else np.asarray(features, dtype=np.float32)
    vectors = np.ascontiguousarray(embeddings, dtype=np.float32)
    if vectors.ndim != 2 or len(vectors) != len(y):
        raise ValueError(f"embeddings: shape {list(vectors.shape)}, must be [{len(y)}, dim], one for each length")
    if raw.ndim != 2 or len(raw) != len(y) or raw.shape[1] != len(feature_names):
        raise ValueError(f"features: shape {list(raw.shape)}, must be {[len(y), len(feature_names)]} {feature_names}")
    rng = np.random.default_rng(seed)
    held, num_duplicates = _held_out(vectors, validation_share, rng)
    mean = raw[~held].mean(axis=0, dtype=np.float64).astype(np.float32)
    scale = np.maximum(raw[~held].std(axis=0, dtype=np.float64), _SMALLEST_SCALE).astype(np.float32)
    lowest, highest = (min(max(round(math.exp(v)), 1), LONGEST_TOKENS) for v in (y.min(), y.max()))
    spec = DecoderSpec(
        dim=vectors.shape[1], hidden=hidden, features=feature_names, encoder=encoder, min_tokens=lowest,
        max_tokens=highest, num_examples=len(y),
    )  # fmt: skip
    x = inputs(spec, vectors, raw, mean, scale)
    constants = np.quantile(y[~held], (0.5, P90)).astype(np.float32)
    weights = initial_weights(spec, constants, rng)
    descent = descend(weights, (x[~held], y[~held]), (x[held], y[held]), rng, options, on_epoch)
    kept = descent.history[descent.best_epoch]
    tensors = {"feature_mean": mean, "feature_scale": scale, **descent.weights}
    judge = held if judged is None else _checked(judged, len(y))
    raw_decoder = Decoder(spec, tensors)
    uncalibrated = raw_decoder.log_quantiles(vectors[judge], raw[judge])
    decoder = _calibrated(raw_decoder, vectors[judge], raw[judge], y[judge])
    predicted = decoder.log_quantiles(vectors[judge], raw[judge])
    report = TrainingReport(
        seed=seed,
        num_train=int((~held).sum()),
        num_validation=int(judge.sum()),
        num_duplicates=num_duplicates,
        epochs=len(descent.history) - 1,
        best_epoch=descent.best_epoch,
        stopped_early=len(descent.history) - 1 < epochs,
        train_loss=kept.train_loss,
        validation_loss=kept.validation_loss if judged is None else pinball(uncalibrated, y[judge]),
        constant_loss=pinball(np.broadcast_to(constants, (int(judge.sum()), 2)), y[judge]),
        p90_coverage=float((y[judge] <= predicted[:, 1] + 1e-6).mean()),
        median_relative_error=float(np.median(np.abs(np.expm1(predicted[:, 0] - y[judge])))),
    )
    measured = replace(spec, skill=report.skill, p90_coverage=report.p90_coverage)
    return Decoder(measured, decoder.tensors), report


def pinball(quantiles: npt.NDArray[Any], y: npt.NDArray[Any]) -> float:
    """Return the mean pinball loss of P50 and P90 ([n, 2]) against y ([n]), both as logs: in nats."""
    missed = y[:, None] - quantiles
    level = np.array([0.5, P90])
    return float(np.maximum(level * missed, (level - 1) * missed).sum(axis=1).mean())


def _log_lengths(lengths: npt.ArrayLike) -> Floats:
    tokens = np.asarray(lengths)
    if tokens.ndim != 1 or len(tokens) < MIN_EXAMPLES:
        raise ValueError(f"lengths: shape {list(tokens.shape)}, must be [n] with n at least {MIN_EXAMPLES}")
    if tokens.dtype.kind not in "iu" or (tokens < 1).any() or (tokens > LONGEST_TOKENS).any():
        raise ValueError(f"lengths: must be whole tokens of 1 to {LONGEST_TOKENS}")
    logs: Floats = np.log(tokens).astype(np.float32)
    return logs


def _checked(judged: npt.NDArray[np.bool_], count: int) -> npt.NDArray[np.bool_]:
    if judged.dtype != np.bool_ or judged.shape != (count,) or not judged.any():
        raise ValueError(f"judged: must be [{count}] bool, some of them true")
    return judged


def held_out(vectors: npt.ArrayLike, *, seed: int = 0, validation_share: float = 0.15) -> npt.NDArray[np.bool_]:
    """Return which examples `train` holds out, [n], under these arguments."""
    matrix = np.ascontiguousarray(vectors, dtype=np.float32)
    return _held_out(matrix, validation_share, np.random.default_rng(seed))[0]


def _held_out(vectors: Floats, share: float, rng: np.random.Generator) -> tuple[npt.NDArray[np.bool_], int]:
    """Choose examples to hold out, [n]; equal embeddings go together, so that no prompt is on both sides."""
    group: dict[bytes, int] = {}
    of = np.array([group.setdefault(vector.tobytes(), len(group)) for vector in vectors])
    if len(group) < MIN_EXAMPLES:
        raise ValueError(f"embeddings: {len(group)} different ones, at least {MIN_EXAMPLES} are needed")
    chosen = rng.permutation(len(group))[: min(max(1, round(share * len(group))), len(group) - 1)]
    return np.isin(of, chosen), len(of) - len(group)


def _calibrated(decoder: Decoder, vectors: Floats, raw: Floats, y: Floats) -> Decoder:
    """Shift the gap between P50 and P90 by one bias so that nine in ten of some examples end within P90.

    Bisection: coverage rises with the bias, and P90 stays at or above P50 whatever it is. With fewer than 50 examples a
    share of 90 % says too little, and nothing is done.
    """
    if len(y) < _MIN_CALIBRATION:
        return decoder
    last = f"bias{len(decoder.spec.hidden)}"
    wanted = min(math.ceil((len(y) + 1) * P90), len(y))

    def shifted(by: float) -> Decoder:
        bias = decoder.tensors[last] + np.array([0, by], dtype=np.float32)
        return Decoder(decoder.spec, {**decoder.tensors, last: bias})

    low, high = -10.0, 10.0
    for _ in range(30):
        middle = (low + high) / 2
        covered = (y <= shifted(middle).log_quantiles(vectors, raw)[:, 1] + 1e-6).sum()
        low, high = (low, middle) if covered >= wanted else (middle, high)
    return shifted(high)
