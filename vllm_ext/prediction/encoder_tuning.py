"""Make an encoder of the default one whose embeddings know about output lengths, and that costs half as much.

A general embedding puts prompts together that are about the same; how long the answer is depends as much on what is
asked of it. Here the first layers of the encoder's transformer, and a linear head on the mean over tokens, are
fine-tuned on recorded prompts to say nine quantiles of the log output length. The head is then dropped: retrieval finds
neighbours by the new embeddings and the decoder is trained on them, so that everything else stays as it is, and what is
served is learned from as ever.

Unlike a proxy model (S3, SSJF) it need not carry all layers, as neighbours make up for what is missing, and it need not
be tuned again when lengths change, as the store follows them. Measured in docs/prediction-evaluation.md.

Source: our own. Pinball loss: Koenker and Bassett, 1978.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_ext.prediction.encoder import Encoder, find_model
from vllm_ext.prediction.fine_tuning import LengthTransformer, TuningError
from vllm_ext.prediction.tuning_options import TuningOptions

MIN_EXAMPLES = 100
"""Different prompts below which tuning learns the held-out ones by chance."""
LEVELS = tuple(level / 10 for level in range(1, 10))
_VALIDATION_SHARE = 0.15
_LEAST_SKILL = 0.01
"""Less may be chance."""
_SMALLEST_SCALE = 1e-3


class NothingLearnedError(TuningError):
    """Too few prompts, or they say nothing of the lengths: the encoder is better left as it is."""


Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class EncoderReport:
    """How an encoder was tuned.

    Losses are mean pinball losses of the nine quantiles on held-out examples, in standard deviations of the log length.
    """

    base: str
    """`Encoder.name` of the encoder it was made of."""
    layers: int
    of_layers: int
    """Of the encoder it was made of."""
    num_train: int
    num_validation: int
    epochs: int
    """Run."""
    best_epoch: int
    """Whose weights were kept, at least 1."""
    constant_loss: float
    """Of the training examples' quantiles, the same for every prompt."""
    validation_loss: float
    """At the best epoch."""

    @property
    def skill(self) -> float:
        """1 - validation loss / constant loss: 0 is no better than a constant."""
        return 1 - self.validation_loss / self.constant_loss


@dataclass(frozen=True, eq=False)
class TunedModel:
    """The transformer, and what it was tuned by."""

    model: LengthTransformer
    report: EncoderReport
    held: Bools
    """[n], examples it was not tuned on, which end the tuning: what is learned from its embeddings is to be judged by
    these."""


def tune(
    encoder: Encoder,
    texts: Sequence[str],
    lengths: npt.ArrayLike,
    *,
    model: str | None = None,
    layers: int | None = None,
    seed: int = 0,
    options: TuningOptions | None = None,
    on_update: Callable[[int, int, float], None] | None = None,
) -> TunedModel:
    """Tune. Global random states are left alone; torch's threads are those the encoder set.

    Args:
        encoder: Whose window is taken; it is not changed.
        texts: n prompts as the predictor sees them. Equal ones are on one side of the split.
        lengths: [n], true output lengths in tokens, at least 1.
        model: What the encoder was built from; None for the default model.
        layers: Of its transformer, from the first, that are kept; None for half of them, rounded up.
        seed: Of head, split, order and dropout.
        options: How; None for the defaults.
        on_update: Told updates done, updates at most, and the last held-out loss; what it raises ends the training.

    Raises:
        NothingLearnedError: fewer than 100 different prompts, or no better than a constant on held-out ones.
        TuningError: the model can't be read or has fewer layers, or training diverged.
    """
    import torch

    chosen = options or TuningOptions()
    logs = np.log(np.asarray(lengths, dtype=np.float64))
    held = _held_out(texts, np.random.default_rng([seed, 2]))
    middle, scale = float(np.median(logs[~held])), max(float(logs[~held].std()), _SMALLEST_SCALE)
    targets = ((logs - middle) / scale).astype(np.float32)
    constants = np.quantile(targets[~held], LEVELS).astype(np.float32)
    kept = half_of(model) if layers is None else layers
    transformer = LengthTransformer(
        encoder.window_of, len(LEVELS), model=model, seed=seed, layers=kept, bias=constants
    )  # fmt: skip
    fitted = np.flatnonzero(~held)
    most = chosen.updates(len(fitted))
    losses, best = transformer.tune(
        texts, targets, fitted=fitted, held=np.flatnonzero(held), loss=_pinball, options=chosen,
        on_update=None if on_update is None else lambda done, loss: on_update(done, most, loss),
    )  # fmt: skip
    constant = float(_pinball(torch.from_numpy(constants), torch.from_numpy(targets[held])))
    if best == 0 or losses[best] > (1 - _LEAST_SKILL) * constant:
        raise NothingLearnedError(
            f"tuned on {len(fitted)} prompts the encoder is no better than a constant on {int(held.sum())} others"
        )
    report = EncoderReport(
        base=encoder.name,
        layers=kept,
        of_layers=transformer.source_layers,
        num_train=len(fitted),
        num_validation=int(held.sum()),
        epochs=len(losses) - 1,
        best_epoch=best,
        constant_loss=constant,
        validation_loss=losses[best],
    )
    return TunedModel(transformer, report, held)


def half_of(model: str | None) -> int:
    """Return half of a model's layers, rounded up; arguments and errors as of `layers_of`."""
    return (layers_of(model) + 1) // 2


def layers_of(model: str | None) -> int:
    """Return how many layers a model has; None is the default model.

    Raises:
        TuningError: it can't be read.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(find_model(model)[1]), trust_remote_code=False)
        return int(config.num_hidden_layers)
    except (OSError, ValueError, AttributeError) as error:
        raise TuningError(f"model={model!r}: cannot be read as a transformer ({error})") from error


def _held_out(texts: Sequence[str], rng: np.random.Generator) -> Bools:
    group: dict[str, int] = {}
    of = np.array([group.setdefault(text, len(group)) for text in texts])
    if len(group) < MIN_EXAMPLES:
        raise NothingLearnedError(
            f"{len(group)} different prompts: to tune an encoder at least {MIN_EXAMPLES} are needed"
        )
    return np.isin(of, rng.permutation(len(group))[: round(_VALIDATION_SHARE * len(group))])


def _pinball(outputs: Any, targets: Any) -> Any:
    """Return the mean pinball loss of outputs [n, levels], or [levels] for all, as a tensor."""
    import torch

    levels = torch.tensor(LEVELS)
    missed = targets.unsqueeze(1) - outputs
    return torch.maximum(levels * missed, (levels - 1) * missed).mean()
