"""Output-length prediction: the interface, and the sources tried in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from vllm_ext.config import PredictionConfig
from vllm_ext.prediction.history import LengthHistory
from vllm_ext.prediction.lognormal import LogNormal


class LengthQuery(NamedTuple):
    """What may be known of a request before it runs. Lengths in tokens."""

    num_prompt_tokens: int
    max_tokens: int
    """The client's bound: caps a prediction, and is none itself."""
    osl: int | None = None
    """Output length the client expects."""
    tag: str | None = None
    """Name of the application or tenant, where the client gave one."""


class Prediction(NamedTuple):
    """A predicted output length and where it came from."""

    tokens: int
    source: str
    p90: int | None = None
    """Nine in ten such requests end by here; None where the source does not say."""


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

    def __init__(
        self, sources: Sequence[LengthSource], prior_tokens: int, preference: Sequence[str] | None = None
    ) -> None:
        """Take the sources, best first.

        Args:
            sources: Those that answer at once.
            prior_tokens: Output length assumed where none answers.
            preference: Names of all sources, best first, those included that answer later; None for ``sources`` alone.
        """
        self.sources = tuple(sources)
        self.prior_tokens = prior_tokens
        self._preference = tuple(s.name for s in sources) if preference is None else tuple(preference)

    @classmethod
    def from_config(cls, config: PredictionConfig) -> LengthPredictor:
        """Build the sources that ``config`` names; ``oracle`` is not one of them, the scheduler asks it itself.

        Neither is ``retrieval``: its predictions come later, from another process.
        """
        makers: dict[str, Callable[[], LengthSource]] = {
            "hint": HintSource,
            "history": lambda: LengthHistory(config.window, config.quantile),
        }
        at_once = [makers[name]() for name in config.sources if name in makers]
        return cls(at_once, config.prior_tokens, config.sources)

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

    def prefers(self, name: str, to: str) -> bool:
        """Whether a source is preferred to the one a prediction came from; to the prior and to strangers always."""
        order = self._preference
        return name in order and (to not in order or order.index(name) < order.index(to))

    def beyond(self, query: LengthQuery, prediction: Prediction, generated: int) -> int | None:
        """Return the median length of a request that outlived its prediction, in tokens; None if nobody can tell.

        A prediction with a P90 is a log-normal distribution; one of the history is a window of lengths. What was
        generated conditions either. At least ``generated + 1``; the client's bound is left to the caller.
        """
        if prediction.p90 is not None:
            law = LogNormal.through(prediction.tokens, max(prediction.p90, prediction.tokens))
            return max(generated + 1, round(law.quantile_beyond(0.5, generated)))
        for source in self.sources:
            if source.name == prediction.source and isinstance(source, LengthHistory):
                return source.beyond(query, generated)
        return None
