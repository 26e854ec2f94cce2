"""Output-length prediction at arrival: the sources that answer at once, tried in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from vllm_ext.config import PredictionConfig
from vllm_ext.contract.length_distribution import LengthDistribution, Prediction
from vllm_ext.prediction.history import LengthHistory
from vllm_ext.prediction.query import LengthQuery, LengthSource

_PRIOR_SPREAD = 1.0
"""Standard deviation of the log length that nothing is known of, in nats: that of chats is 0.9 to 1.2."""


class HintSource:
    """The client's own expectation (``osl``), taken at its word."""

    name = "hint"

    def predict(self, query: LengthQuery) -> LengthDistribution | None:
        """Return the client's expected output length, if it gave one."""
        return None if query.osl is None else LengthDistribution.point(query.osl)

    def observe(self, query: LengthQuery, output_tokens: int) -> None:
        """Nothing to learn: a client that errs is caught by demotion."""


class LengthPredictor:
    """Asks the sources in order of preference; where none answers, a prior does."""

    def __init__(
        self, sources: Sequence[LengthSource], prior_tokens: int, preference: Sequence[str] | None = None
    ) -> None:
        """Take the sources, best first.

        Args:
            sources: Those that answer at once.
            prior_tokens: Median output length assumed where none answers.
            preference: Names of all sources, best first, those included that answer later; None for ``sources`` alone.
        """
        self.sources = tuple(sources)
        self._prior = LengthDistribution.lognormal(math.log(prior_tokens), _PRIOR_SPREAD)
        self._preference = tuple(s.name for s in sources) if preference is None else tuple(preference)

    @classmethod
    def from_config(cls, config: PredictionConfig) -> LengthPredictor:
        """Build the sources that ``config`` names; ``oracle`` is not one of them, the scheduler asks it itself.

        Neither is ``retrieval``: its predictions come later, from another process.
        """
        makers: dict[str, Callable[[], LengthSource]] = {
            "hint": HintSource,
            "history": lambda: LengthHistory(config.window),
        }
        at_once = [makers[name]() for name in config.sources if name in makers]
        return cls(at_once, config.prior_tokens, config.sources)

    def predict(self, query: LengthQuery) -> Prediction:
        """Return the distribution of a length of at most ``query.max_tokens`` tokens."""
        for source in self.sources:
            distribution = source.predict(query)
            if distribution is not None:
                return Prediction(distribution.capped(query.max_tokens), source.name)
        return Prediction(self._prior.capped(query.max_tokens), "prior")

    def observe(self, query: LengthQuery, output_tokens: int) -> None:
        """Tell every source how long a finished request became."""
        for source in self.sources:
            source.observe(query, output_tokens)

    def prefers(self, name: str, to: str) -> bool:
        """Whether a source is preferred to the one a prediction came from; to the prior always, to the oracle never."""
        order = self._preference
        return to != "oracle" and name in order and (to not in order or order.index(name) < order.index(to))
