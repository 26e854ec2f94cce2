"""Requests that a step may leave out: what changes with each of their tokens is counted, not written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.request import Request

if TYPE_CHECKING:
    from collections.abc import Callable


class Ticks:
    """Steps of an engine so far, which its hidden requests count by.

    Attributes:
        scheduled: Steps that were scheduled.
        processed: Steps whose output was processed.
        show: Shows a hidden request again.
    """

    __slots__ = ("processed", "scheduled", "show")

    def __init__(self, show: Callable[[CohortRequest], None]) -> None:
        self.scheduled = self.processed = 0
        self.show = show


class CohortRequest(Request):
    """A request of vLLM's that can be hidden, as long as each step computes one token of it.

    Whoever reads how far it has come reads what vLLM would have written. Token ids and block hashes are up to date
    while it is shown.

    Attributes:
        hidden: Whether vLLM's scheduler is not told of it.
        hidden_at: First step that it was last hidden in.
        shown_at: First step after that in which it was shown again.
        shows_at: Step by which it must be shown: the last that may compute a token of it.
        fills_at: Step in which it needs a new KV block.
        counted_to: Steps whose output is in its token ids.
    """

    hidden = False
    hidden_at = shown_at = shows_at = fills_at = counted_to = -1
    _ticks: Ticks
    _computed = 0
    _eligible_step = 0

    def join(self, ticks: Ticks) -> None:
        """Count by an engine's steps."""
        self._ticks = ticks

    @property
    def offset(self) -> int:
        """Computed tokens of a hidden request minus the steps scheduled."""
        return self._computed

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is computed, those of scheduled steps included."""
        return self._computed + self._ticks.scheduled if self.hidden else self._computed

    @num_computed_tokens.setter
    def num_computed_tokens(self, tokens: int) -> None:
        if self.hidden:
            raise RuntimeError(f"{self.request_id}: is hidden, and its computed tokens may not be set")
        self._computed = tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        known = len(self._all_token_ids)
        return known + self._ticks.processed - self.counted_to if self.hidden else known

    @property
    def num_tokens_with_spec(self) -> int:
        """The same, with drafts."""
        return self.num_tokens + len(self.spec_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the output."""
        known = len(self._output_token_ids)
        return known + self._ticks.processed - self.counted_to if self.hidden else known

    @property
    def next_decode_eligible_step(self) -> int:
        """The step before which vLLM passes over the request."""
        return self._eligible_step

    @next_decode_eligible_step.setter
    def next_decode_eligible_step(self, step: int) -> None:
        if self.hidden:
            self._ticks.show(self)
        self._eligible_step = step

    def was_hidden_in(self, step: int) -> bool:
        """Whether a request that is shown now was hidden in a step."""
        return self.hidden_at <= step < self.shown_at and not self.hidden

    def hide(self) -> None:
        """Count tokens by steps from here on."""
        self._computed -= self._ticks.scheduled
        self.hidden = True
        self.hidden_at = self._ticks.scheduled
        self.counted_to = self._ticks.processed

    def catch_up(self, token_id: int) -> int:
        """Write the tokens of the steps processed meanwhile; return how many.

        Args:
            token_id: Each of them.
        """
        missing = self._ticks.processed - self.counted_to
        if missing:
            tokens = [token_id] * missing
            self._output_token_ids.extend(tokens)
            self._all_token_ids.extend(tokens)
            self.counted_to = self._ticks.processed
            self.update_block_hashes()
        return missing

    def unhide(self) -> None:
        """Write down how far the request has come; its tokens must be up to date."""
        ticks = self._ticks
        self.hidden = False
        self.shown_at = ticks.scheduled
        self._computed += ticks.scheduled
        under_way = ticks.scheduled - ticks.processed
        self.num_in_flight_tokens = self.num_output_placeholders = under_way
