"""What a cost model is told of a step."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add
from typing import NamedTuple, Protocol


class StepShape(NamedTuple):
    """The work of one engine step. Lengths and contexts are tokens."""

    num_requests: int
    """Rows of the batch, at least 1."""
    num_tokens: int
    """Tokens computed, over all rows."""
    num_decodes: int
    """Rows that compute one token of a sequence whose context is held."""
    num_sampled: int
    """Rows that produce a token: all but prefill chunks that are not the last."""
    decode_context_tokens: int
    """Sum over decoding rows of the tokens they attend to, the new one included."""
    prefill_context_tokens: int
    """Sum over prefill rows of the tokens they attend to at their end: what was held before, plus the chunk."""
    prefill_pairs: float
    """Sum over prefill rows of (query, key) pairs under the causal mask: chunk * (held + (chunk + 1) / 2)."""

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens computed by prefill rows."""
        return self.num_tokens - self.num_decodes

    @classmethod
    def of_decodes(cls, count: int, context: int) -> StepShape:
        """Return a step of so many rows that each attend to ``context`` tokens, the new one included."""
        return cls(count, count, count, count, count * context, 0, 0.0)

    @classmethod
    def of_chunk(cls, tokens: int, held: int = 0, *, sampled: bool = True) -> StepShape:
        """Return a step of one prefill row behind ``held`` tokens; ``sampled``: it completes the prompt."""
        return cls(1, tokens, 0, int(sampled), 0, held + tokens, tokens * (held + (tokens + 1) / 2))

    @classmethod
    def of_rows(cls, rows: Iterable[tuple[int, int]]) -> StepShape:
        """Return a step of rows without gaps, each given by its tokens and by those held before; all are sampled."""
        shapes = (cls.of_decodes(1, held + 1) if tokens == 1 else cls.of_chunk(tokens, held) for tokens, held in rows)
        return reduce(cls.plus, shapes, EMPTY_SHAPE)

    def plus(self, other: StepShape) -> StepShape:
        """Return a step of both's rows."""
        return StepShape(*map(add, self, other))


EMPTY_SHAPE = StepShape(0, 0, 0, 0, 0, 0, 0.0)


class CostModel(Protocol):
    """How long things take on the simulated hardware. Pure: the same shape always costs the same."""

    def device_s(self, shape: StepShape) -> float:
        """Return the time the device computes a step, in seconds."""
        ...

    def host_s(self, shape: StepShape) -> float:
        """Return the engine core's own time per step, in seconds.

        Scheduling, input preparation and output processing: the device idles meanwhile with synchronous scheduling,
        and works on the step before with async scheduling.
        """
        ...
