"""VTC (OSDI '24): clients take turns by what they were served."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm_ext.contract import Origin, Sharing
from vllm_ext.contract.checks import require
from vllm_ext.systems.system import System

_DEFAULT = "*"


@dataclass(frozen=True, kw_only=True)
class TakeTurns(Sharing):
    """The client that was served least, for its weight, goes first; which of its requests, the ordering says.

    Service is ``prompt_weight`` per prompt token that is computed and ``output_weight`` per generated token. Who comes
    back after a pause starts from the least counter of those who wait: idling saves nothing up. Of two clients that
    both wait all the time, neither gets ahead of the other by more than 2 * max(``prompt_weight`` * longest prompt,
    ``output_weight`` * tokens that the KV memory holds), divided by its weight.

    Source: VTC (Sheng et al., OSDI '24), Algorithms 2 and 4, Theorem 4.4; theirs serve a client's requests by arrival.
    """

    uses_predictions: ClassVar[bool] = False

    by: str = "key"
    """What tells clients apart: ``key`` (API key; requests without one by their tag), ``tag``, ``salt`` (vLLM's
    ``cache_salt``), or ``adapter`` (LoRA). Tags and salts are the client's own choice."""
    weights: Mapping[str, Any] = field(default_factory=dict)
    """Shares of clients, by name, above 0; ``*`` stands for those that are not named, 1 by default."""
    prompt_weight: float = 1.0
    """Service per prompt token that is computed; what the prefix cache has is free."""
    output_weight: float = 2.0
    """Service per generated token."""

    def __post_init__(self) -> None:
        require(self.by in Origin._fields, "sharing.by", self.by, f"one of {', '.join(Origin._fields)}")
        require(isinstance(self.weights, Mapping), "sharing.weights", self.weights, "an object of numbers by client")
        for client, weight in self.weights.items():
            number = isinstance(weight, int | float) and not isinstance(weight, bool)
            fits = number and 0 < weight < math.inf
            require(fits, f"sharing.weights[{client!r}]", weight, "a number greater than 0, and finite")
        for name in ("prompt_weight", "output_weight"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"sharing.{name}", value, "at least 0, and finite")
        both = self.prompt_weight + self.output_weight
        require(both > 0, "sharing.output_weight", self.output_weight, "greater than 0 where prompt_weight is 0")

    @property
    def prices(self) -> tuple[float, float]:
        """Service per prompt token and per output token."""
        return self.prompt_weight, self.output_weight

    def client(self, origin: Origin) -> str:
        """Return what tells this client apart; requests that say nothing are one client together."""
        return str(getattr(origin, self.by)) or (origin.tag if self.by == "key" else "")

    @property
    def chosen_by_clients(self) -> str:
        """Tags and salts."""
        return {"tag": "their tags", "salt": "their cache_salt"}.get(self.by, "")

    def weight(self, client: str) -> float:
        """Return the client's share."""
        return float(self.weights.get(client, self.weights.get(_DEFAULT, 1.0)))


ROWS = (
    System(
        name="fair",
        sharing=TakeTurns,
        paper="VTC (OSDI '24)",
        summary="clients take turns by the tokens they were served, whatever they send",
    ),
)
