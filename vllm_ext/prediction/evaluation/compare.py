"""Fit predictors on some requests and measure them on others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vllm_ext.prediction.encoder import Encoder
from vllm_ext.prediction.evaluation.learned import Combined, DecoderAlone, Knowledge, Retrieval
from vllm_ext.prediction.evaluation.measures import Deciles, Predicted, score
from vllm_ext.prediction.evaluation.predictor import Predictor
from vllm_ext.prediction.evaluation.priors import BucketHistory, GlobalHistory, MaxTokens, Oracle, PromptLength
from vllm_ext.prediction.evaluation.proxy import PROXIES, Proxy
from vllm_ext.prediction.evaluation.rows import DataSet, EvaluationError, Examples, Vectors, not_in
from vllm_ext.prediction.evaluation.tuned import TUNED, Tuned

OURS = ("alise", "shrunk", "retrieval", "decoder", *TUNED)
PRIORS = ("prompt-length", "bucket-history", "history", "max-tokens")
NAMES = (*OURS, *PROXIES, *PRIORS, Oracle.name)
"""Every predictor, in the order of tables."""
READING_TEXTS: dict[str, type[Tuned | Proxy]] = {**TUNED, **PROXIES}
"""Those that tune a transformer, which takes minutes, and embed prompts themselves."""
QUICK_TO_FIT = tuple(name for name in NAMES if name not in READING_TEXTS)
"""Those that are fitted in seconds."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the predictors share."""

    encoder: Encoder
    model: str | None = None
    """What the encoder was built from; None for its default."""
    max_tokens: int = 4096
    """The clients' bound on outputs."""
    seed: int = 0


@dataclass(kw_only=True, eq=False)
class Comparison:
    """Predictors that learned from the same examples, and what was measured on others."""

    train: Examples
    predictors: Sequence[Predictor]
    seconds: dict[str, float] = field(default_factory=dict)
    """Time each took to learn; what several share is counted for the first."""

    def fit(self, on_fit: Callable[[str], None] | None = None, clock: Callable[[], float] | None = None) -> None:
        """Let all of them learn.

        Args:
            on_fit: Told the name of each before it begins.
            clock: Seconds, for `seconds`; None: not measured.

        Raises:
            ValueError: one can't learn from so few examples.
        """
        for predictor in self.predictors:
            if on_fit is not None:
                on_fit(predictor.name)
            started = clock() if clock is not None else 0.0
            predictor.fit(self.train)
            if clock is not None:
                self.seconds[predictor.name] = clock() - started

    def predict(self, test: Examples) -> dict[str, Predicted]:
        """Return what each says of the tested prompts; only the oracle is told the truth."""
        found = {}
        for predictor in self.predictors:
            if isinstance(predictor, Oracle):
                predictor.reveal(test.lengths)
            found[predictor.name] = predictor.predict(test.prompts)
        return found

    def scores(self, predictions: Mapping[str, Predicted], test: Examples) -> dict[str, dict[str, float]]:
        """Return the measures of each; classes are tenths of the training lengths."""
        deciles = Deciles(self.train.lengths)
        return {name: score(said, test.lengths, deciles) for name, said in predictions.items()}


def check_names(names: Sequence[str]) -> None:
    """Check names of predictors.

    Raises:
        EvaluationError: there is none of a name, or none is named.
    """
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        raise EvaluationError(f"predictors={','.join(unknown)!r}: must be among {', '.join(NAMES)}")


def predictors(names: Sequence[str], setting: Setting) -> list[Predictor]:
    """Build predictors by their names, in the order of `NAMES`.

    Raises:
        EvaluationError: as of `check_names`.
    """
    check_names(names)
    knowledge = Knowledge(setting.encoder.dim, seed=setting.seed)
    makers: dict[str, Callable[[], Predictor]] = {
        Retrieval.name: lambda: Retrieval(knowledge),
        DecoderAlone.name: lambda: DecoderAlone(knowledge),
        PromptLength.name: PromptLength,
        BucketHistory.name: BucketHistory,
        GlobalHistory.name: GlobalHistory,
        MaxTokens.name: lambda: MaxTokens(setting.max_tokens),
        Oracle.name: Oracle,
    }
    made: list[Predictor] = []
    for name in (name for name in NAMES if name in names):
        if name in READING_TEXTS:
            made.append(READING_TEXTS[name](setting.encoder, model=setting.model, seed=setting.seed))
        elif name in makers:
            made.append(makers[name]())
        else:
            made.append(Combined(name, knowledge))
    return made


def embedded(
    examples: Examples, encoder: Encoder, *, on_progress: Callable[[int], None] | None = None, chunk: int = 64
) -> Examples:
    """Return the examples with the embeddings of their prompts.

    Args:
        examples: Their old embeddings are dropped.
        encoder: Whose vectors are wanted.
        on_progress: Told how many prompts are done.
        chunk: Prompts between two reports.
    """
    vectors: Vectors = np.empty((len(examples), encoder.dim), dtype=np.float32)
    for start in range(0, len(examples), chunk):
        texts = examples.prompts.texts[start : start + chunk]
        vectors[start : start + len(texts)] = encoder.encode(texts)
        if on_progress is not None:
            on_progress(start + len(texts))
    return Examples(prompts=replace(examples.prompts, vectors=vectors), lengths=examples.lengths)


def without_repeated(test: Examples, train: Examples) -> tuple[Examples, int]:
    """Leave out tested prompts that were learned from, and return how many they were.

    Raises:
        EvaluationError: nothing is left.
    """
    kept = not_in(test.prompts.texts, train.prompts.texts)
    if not len(kept):
        raise EvaluationError(f"all {len(test)} tested prompts were learned from; nothing is left to test on")
    return test.take(kept), len(test) - len(kept)


def same_unit(train: DataSet, test: DataSet) -> None:
    """Check that both count in the same tokens.

    Raises:
        EvaluationError: they don't.
    """
    if train.tokenizer != test.tokenizer:
        raise EvaluationError(
            f"{train.name} has lengths in tokens of {train.tokenizer}, {test.name} of {test.tokenizer}: must be the "
            "same; give files that both have answers, or both output_tokens"
        )
