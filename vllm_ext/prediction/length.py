"""Output-length prediction: the interface, and the sources tried in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from vllm_ext.config import PredictionConfig
from vllm_ext.prediction.history import LengthHistory


class LengthQuery(NamedTuple):
    """What may be known of a request before it runs. Lengths in tokens."""

    num_prompt_tokens: int
    max_tokens: int
    """The client's bound: caps a prediction, and is none itself."""
    osl: int | None = None
    """Output length the client expects."""


class Prediction(NamedTuple):
    """A predicted output length and where it came from."""

    tokens: int
    source: str


class LengthSource(Protocol):
    """One way to predict output lengths."""

    name: str

    def predict(self, query: LengthQuery) -> int | None:
        """Return the predicted output length in tokens, or None if this source has nothing to say."""
        ...

    def observe(self, query: LengthQuery, output_tokens: int) -> None:
        """Learn from a request that finished by itself or at its bound."""
        ...


class HintSource:
    """The client's own expectation (``osl``)."""

    name = "hint"

    def predict(self, query: LengthQuery) -> int | None:
        """Return the client's expected output length, if it gave one."""
        return query.osl

    def observe(self, query: LengthQuery, output_tokens: int) -> None:
        """Nothing to learn: a client that errs is caught by demotion."""


class LengthPredictor:
    """Asks the sources in order of preference; a constant prior answers when none does."""

    def __init__(self, sources: Sequence[LengthSource], prior_tokens: int) -> None:
        self.sources = tuple(sources)
        self.prior_tokens = prior_tokens

    @classmethod
    def from_config(cls, config: PredictionConfig) -> LengthPredictor:
        """Build the sources that ``config`` names; ``oracle`` is not one of them, the scheduler asks it itself."""
        makers: dict[str, Callable[[], LengthSource]] = {
            "hint": HintSource,
            "history": lambda: LengthHistory(config.window, config.quantile),
        }
        return cls([makers[name]() for name in config.sources if name in makers], config.prior_tokens)

    def predict(self, query: LengthQuery) -> Prediction:
        """Return a prediction of at least 1 and at most ``query.max_tokens`` tokens."""
        for source in self.sources:
            tokens = source.predict(query)
            if tokens is not None:
                return Prediction(max(1, min(tokens, query.max_tokens)), source.name)
        return Prediction(max(1, min(self.prior_tokens, query.max_tokens)), "prior")

    def observe(self, query: LengthQuery, output_tokens: int) -> None:
        """Tell every source how long a finished request became."""
        for source in self.sources:
            source.observe(query, output_tokens)
