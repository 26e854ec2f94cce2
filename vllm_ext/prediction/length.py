"""Output-length prediction at arrival: the sources that answer at once, tried in order, and what clients announce."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vllm_ext.config import PredictionConfig
from vllm_ext.contract.length_distribution import LengthDistribution, Prediction
from vllm_ext.prediction.hint_weights import HintWeights
from vllm_ext.prediction.history import LengthHistory
from vllm_ext.prediction.query import LengthQuery, LengthSource
from vllm_ext.prediction.source_losses import LEVELS, Answers, SourceLosses

HINT = "hint"
_PRIOR_SPREAD = 1.0
"""Standard deviation of the log length that nothing is known of, in nats: that of chats is 0.9 to 1.2."""


class LengthPredictor:
    """Asks the sources in order of preference; where none answers, a prior does. What clients say is weighed in."""

    def __init__(
        self,
        sources: Sequence[LengthSource],
        prior_tokens: int,
        preference: Sequence[str] | None = None,
        hints: HintWeights | None = None,
    ) -> None:
        """Take the sources, best first.

        Args:
            sources: Those that answer at once.
            prior_tokens: Median output length assumed where none answers.
            preference: Names of all sources, best first, those included that answer later; None for ``sources`` alone.
            hints: How far clients are believed; None: at their word.
        """
        self.sources = tuple(sources)
        self.hints = hints
        self._losses = SourceLosses()
        self._prior = LengthDistribution.lognormal(math.log(prior_tokens), _PRIOR_SPREAD)
        self._preference = tuple(s.name for s in sources) if preference is None else tuple(preference)

    @classmethod
    def from_config(cls, config: PredictionConfig) -> LengthPredictor:
        """Build the sources that ``config`` names; ``oracle`` is not one of them, the scheduler asks it itself.

        Neither is ``retrieval``: its predictions come later, from another process.
        """
        at_once = [LengthHistory(config.window)] if LengthHistory.name in config.sources else []
        weights = HintWeights() if config.hints == "weighed" else None
        return cls(at_once, config.prior_tokens, config.sources, weights)

    def predict(self, query: LengthQuery) -> Prediction:
        """Return the distribution of a length of at most ``query.max_tokens`` tokens."""
        for source in self.sources:
            distribution = source.predict(query)
            if distribution is not None:
                return self.with_hint(query, distribution, source.name)
        return self.with_hint(query, self._prior, "prior")

    def with_hint(self, query: LengthQuery, distribution: LengthDistribution, source: str) -> Prediction:
        """Return what ``source`` says of a length, weighed with what the client announced where hints are preferred."""
        if query.osl is None or not self._goes_before(HINT, source):
            return Prediction(distribution.capped(query.max_tokens), source)
        announced = LengthDistribution.point(min(query.osl, query.max_tokens))
        if self.hints is None:
            return Prediction(announced, HINT)
        mixed = distribution.mixed(announced, self.hints.weight(query.client))
        return Prediction(mixed.capped(query.max_tokens), HINT, beside=source)

    def answers_for(self, query: LengthQuery, name: str, late: LengthDistribution) -> Answers:
        """Return what is to be judged when the request has ended: a late answer, and those that are given at once."""
        at_once = {source.name: source.predict(query) for source in self.sources}
        answers = {source: found for source, found in {**at_once, name: late}.items() if found is not None}
        most = query.max_tokens
        return {source: tuple(min(one.quantile(at), most) for at in LEVELS) for source, one in answers.items()}

    def observe(self, query: LengthQuery, output_tokens: int, answers: Answers | None = None) -> None:
        """Tell every source how long a finished request became; ``answers`` are judged by it, if a late one came."""
        self._losses.observe(answers or {}, output_tokens)
        if query.osl is not None and self.hints is not None:
            self.hints.observe(query.client, min(query.osl, query.max_tokens), output_tokens)
        for source in self.sources:
            source.observe(query, output_tokens)

    def prefers(self, name: str, to: Prediction) -> bool:
        """Whether a source is preferred to what a prediction rests on; to the prior always, to the oracle never.

        Of two that have answered for the same requests, the one that was nearer is; before that, the one named first.
        """
        basis = to.beside or to.source
        if basis == "oracle" or name not in self._preference:
            return False
        nearer = self._losses.is_nearer(name, basis)
        return self._goes_before(name, basis) if nearer is None else nearer

    def _goes_before(self, name: str, other: str) -> bool:
        order = self._preference
        return name in order and (other not in order or order.index(name) < order.index(other))
