"""The predictors of this package, as the service uses them: retrieval, decoder, and their combinations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_ext.prediction import retrieval
from vllm_ext.prediction.blend import Strategy, strategy
from vllm_ext.prediction.decoder import LONGEST_TOKENS, Decoder
from vllm_ext.prediction.decoder_train import MIN_EXAMPLES
from vllm_ext.prediction.estimate import PRIOR, Estimate
from vllm_ext.prediction.evaluation.measures import Predicted
from vllm_ext.prediction.evaluation.predictor import LEVELS
from vllm_ext.prediction.evaluation.priors import WINDOW
from vllm_ext.prediction.evaluation.rows import Examples, Ints, Prompts, Vectors
from vllm_ext.prediction.selection import features_for, train_best
from vllm_ext.prediction.vector_store import Neighbours, VectorStore

NEIGHBOURS = 10
"""Similar prompts that are looked at, as the service does (`PredictorConfig.neighbours`)."""
CAPACITY = 100_000
"""Entries of the store, as the service's."""
NEWEST = 20_000
"""Examples a decoder is trained on at most: the newest, as the service does."""


class Knowledge:
    """A store and a decoder, learned from the same requests and shared by the predictors that combine them.

    A decoder that is no better than constants on held-out examples is left out, as the service leaves it out.
    """

    def __init__(self, dim: int, *, neighbours: int = NEIGHBOURS, seed: int = 0) -> None:
        """Start empty.

        Args:
            dim: Width of the embeddings.
            neighbours: Of a prompt, at most.
            seed: Of the store's index and of training.
        """
        self._dim, self._neighbours, self._seed = dim, neighbours, seed
        self._examples: Examples | None = None
        self._lengths: list[int] = []
        self.store = VectorStore(dim, capacity=CAPACITY, seed=seed)
        self.decoder: Decoder | None = None

    def fit(self, examples: Examples, judged: npt.NDArray[np.bool_] | None = None) -> None:
        """Learn anew, unless these are the examples that were learned last.

        Args:
            examples: What to learn from.
            judged: As of `selection.train_best`.
        """
        if self._examples is examples:
            return
        self._examples = examples
        self.store = VectorStore(self._dim, capacity=CAPACITY, seed=self._seed)
        self._lengths, self.decoder = [], None
        self.add(examples.prompts.vectors, examples.lengths)
        self.train_decoder(examples.prompts.vectors, examples.lengths, examples.prompts.tokens, judged)

    def add(self, vectors: Vectors, lengths: Ints) -> None:
        """Insert finished requests into the store; the decoder stays as it is."""
        self.store.add(vectors, lengths)
        self._lengths.extend(lengths.tolist())

    def train_decoder(
        self,
        vectors: Vectors,
        lengths: Ints,
        prompt_tokens: Ints | None = None,
        judged: npt.NDArray[np.bool_] | None = None,
    ) -> bool:
        """Train a decoder on the newest examples and take it if it is of use; return whether it was taken."""
        tokens = np.zeros(len(lengths), np.int64) if prompt_tokens is None else prompt_tokens
        vectors, lengths, tokens = vectors[-NEWEST:], lengths[-NEWEST:], tokens[-NEWEST:]
        if len({vector.tobytes() for vector in vectors}) < MIN_EXAMPLES:
            return False
        judges = None if judged is None else judged[-NEWEST:]
        decoder, report = train_best(
            vectors, lengths, tokens, neighbours=self._neighbours, judged=judges, seed=self._seed
        )  # fmt: skip
        if report.skill <= 0:
            return False
        self.decoder = decoder
        return True

    def search(self, vectors: Vectors) -> list[Neighbours]:
        """Return the most similar past prompts of each."""
        if not len(self.store):
            return [NO_NEIGHBOURS] * len(vectors)
        return self.store.search(vectors, self._neighbours)

    def decoded(self, prompts: Prompts) -> Sequence[Estimate | None]:
        """Return the decoder's estimates; None for each while there is no decoder."""
        if self.decoder is None or not len(prompts):
            return [None] * len(prompts)
        return self.decoder.predict(prompts.vectors, features_for(self.decoder, prompts.tokens))

    def prior(self) -> Estimate | None:
        """Median and P90 of the last 1000 lengths, for whom nothing else is known; None before anything finished."""
        if not self._lengths:
            return None
        p50, p90 = np.quantile(self._lengths[-WINDOW:], LEVELS)
        return Estimate(max(1, round(float(p50))), max(1, int(np.ceil(p90))), PRIOR)


NO_NEIGHBOURS = Neighbours(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.float64))


class Retrieval:
    """Algorithm 1's retrieval without its decoder; where no neighbour is similar enough, the global history."""

    name = "retrieval"

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge

    def fit(self, train: Examples) -> None:
        """Fill the store."""
        self._knowledge.fit(train)

    def predict(self, prompts: Prompts) -> Predicted:
        """Return the weighted means of the neighbours."""
        found = self._knowledge.search(prompts.vectors)
        return _answered([retrieval.estimate(n, LONGEST_TOKENS) for n in found], self._knowledge.prior())


class DecoderAlone:
    """The regression alone; where it is no better than a constant, the global history."""

    name = "decoder"

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge

    def fit(self, train: Examples) -> None:
        """Train the decoder."""
        self._knowledge.fit(train)

    def predict(self, prompts: Prompts) -> Predicted:
        """Return its quantiles."""
        return _answered(self._knowledge.decoded(prompts), self._knowledge.prior())


class Combined:
    """Retrieval and decoder by a named strategy of `blend`."""

    def __init__(self, name: str, knowledge: Knowledge, rule: Strategy | None = None) -> None:
        """Take a strategy by its name, or with other parameters under a name of its own."""
        self.name = name
        self._strategy = rule or strategy(name)
        self._suits_itself = rule is None
        self._knowledge = knowledge

    def fit(self, train: Examples) -> None:
        """Fill the store and train the decoder."""
        self._knowledge.fit(train)

    def predict(self, prompts: Prompts) -> Predicted:
        """Return the strategy's estimates; the global history where it has none."""
        pairs = zip(self._knowledge.search(prompts.vectors), self._knowledge.decoded(prompts), strict=True)
        rule = self._strategy
        if self._suits_itself and self._knowledge.decoder is not None:
            rule = rule.suited(self._knowledge.decoder.spec.kernel_width)
        found = [rule.combine(n, decoded, LONGEST_TOKENS) for n, decoded in pairs]
        return _answered(found, self._knowledge.prior())


UNKNOWN = Estimate(256, 256, PRIOR)
"""Before anything finished: the scheduler's constant (`PredictionConfig.prior_tokens`)."""


def _answered(found: Sequence[Estimate | None], prior: Estimate | None) -> Predicted:
    answers = [estimate or prior or UNKNOWN for estimate in found]
    return Predicted(
        np.array([a.tokens for a in answers], dtype=np.int64), np.array([a.p90 for a in answers], dtype=np.int64)
    )
