"""Our combination on an encoder that was tuned for lengths, as `vllm-ext predictor train --tune-encoder` makes it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from vllm_ext.prediction.encoder import Encoder
from vllm_ext.prediction.encoder_tuning import EncoderReport, NothingLearnedError, half_of, layers_of, tune
from vllm_ext.prediction.evaluation.learned import Combined, Knowledge
from vllm_ext.prediction.evaluation.measures import Predicted
from vllm_ext.prediction.evaluation.rows import EvaluationError, Examples, Prompts
from vllm_ext.prediction.fine_tuning import LengthTransformer
from vllm_ext.prediction.tuning_options import TuningOptions

STRATEGY = "shrunk"
"""Algorithm 1 is not for these embeddings: its threshold was made for general ones, and here all prompts are near."""


class Tuned:
    """Tunes the first half of the encoder's layers, then learns store and decoder from the new embeddings.

    Everything goes through the files that a server would read.
    """

    name = "tuned"

    def __init__(
        self,
        encoder: Encoder,
        *,
        model: str | None = None,
        seed: int = 0,
        options: TuningOptions | None = None,
    ) -> None:
        """Nothing is loaded before `fit`.

        Args:
            encoder: Whose window and threads are taken; it is not changed.
            model: What the encoder was built from, whose weights are where tuning starts.
            seed: Of tuning, store and decoder.
            options: As of `encoder_tuning.tune`.
        """
        self._base = encoder
        self._source = model
        self._seed = seed
        self._options = options
        self._encoder: Encoder | None = None
        self._combined: Combined | None = None
        self.report: EncoderReport | None = None
        """How the encoder was tuned; None where it was not."""

    def fit(self, train: Examples) -> None:
        """Tune and learn; what can't be tuned on is learned with the encoder as it is.

        Raises:
            TuningError: as of `encoder_tuning.tune`.
        """
        judged = self.report = None
        self._encoder = self._base
        try:
            found = tune(
                self._base, train.prompts.texts, train.lengths, model=self._source, layers=self._num_layers(),
                seed=self._seed, options=self._options,
            )  # fmt: skip
        except NothingLearnedError:
            pass
        else:
            self._encoder, self.report, judged = _loaded(found.model, self._base), found.report, found.held
        knowledge = Knowledge(self._encoder.dim, seed=self._seed)
        prompts = replace(train.prompts, vectors=self._encoder.encode(train.prompts.texts))
        knowledge.fit(Examples(prompts=prompts, lengths=train.lengths), judged)
        self._combined = Combined(STRATEGY, knowledge)

    def _num_layers(self) -> int | None:
        return None

    def predict(self, prompts: Prompts) -> Predicted:
        """Embed with the tuned encoder, whatever embeddings the prompts have, and combine.

        Raises:
            EvaluationError: `fit` was not called.
        """
        if self._encoder is None or self._combined is None:
            raise EvaluationError(f"{self.name}: fit comes before predict")
        return self._combined.predict(replace(prompts, vectors=self._encoder.encode(prompts.texts)))


class TunedWhole(Tuned):
    """The same with all layers, as proxies have them: somewhat better, at twice the cost."""

    name = "tuned-whole"

    def _num_layers(self) -> int:
        return layers_of(self._source)


TUNED: dict[str, type[Tuned]] = {kind.name: kind for kind in (Tuned, TunedWhole)}


def shortened(encoder: Encoder, model: str | None = None) -> Encoder:
    """Return the first half of an encoder, not tuned: enough to measure latency, which weights don't change."""
    transformer = LengthTransformer(encoder.window_of, 1, model=model, seed=0, layers=half_of(model))
    return _loaded(transformer, encoder)


def _loaded(model: LengthTransformer, base: Encoder) -> Encoder:
    """Write an encoder and read it again as a server does, with the window and threads of another."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "encoder"
        model.save_encoder(place)
        return Encoder(
            str(place),
            threads=base.threads,
            max_tokens=base.max_tokens,
            window=base.window,
            batch_size=base.batch_size,
            precision=base.precision,
        )
