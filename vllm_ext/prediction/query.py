"""What is asked about an output length, and who may answer at once."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from vllm_ext.contract.length_distribution import LengthDistribution
from vllm_ext.contract.request import Origin


class LengthQuery(NamedTuple):
    """What may be known of a request before it runs. Lengths in tokens."""

    num_prompt_tokens: int
    max_tokens: int
    """The client's bound: caps a prediction, and is none itself."""
    osl: int | None = None
    """Output length the client expects."""
    tag: str | None = None
    """Name of the application or tenant, where the client gave one."""
    client: Origin = Origin()
    """Whose hints are weighed with this one's."""


class LengthSource(Protocol):
    """One way to predict output lengths."""

    name: str

    def predict(self, query: LengthQuery) -> LengthDistribution | None:
        """Return the distribution of the output length, or None if this source has nothing to say."""
        ...

    def observe(self, query: LengthQuery, output_tokens: int) -> None:
        """Learn from a request that finished by itself or at its bound."""
        ...
