"""What a client's request was promised, and what its sequences saw."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm_ext.contract.objective import Slo
    from vllm_ext.slo.metrics import Outcome

_ABORT, _ERROR = "abort", "error"


class SequenceTimes(NamedTuple):
    """What one sequence saw until its end; times in seconds."""

    ttft_s: float
    max_gap_s: float | None
    """Longest gap between outputs that carried tokens; None without two of them."""
    jct_s: float
    tokens: int


class SloOutcome:
    """A client's request: what it was promised, and the worst that any of its sequences saw; times in seconds."""

    __slots__ = ("_count", "aborted", "failed", "jct_s", "left", "max_tbt_s", "slo", "tier", "tokens", "ttft_s")

    def __init__(self, count: Callable[[SloOutcome], None], slo: Slo, tier: str, num_sequences: int) -> None:
        self._count = count
        self.slo = slo
        self.tier = tier
        self.left = num_sequences
        """Sequences that have not ended."""
        self.ttft_s: float | None = None
        self.max_tbt_s: float | None = None
        """Longest gap between outputs that carried tokens; None while no sequence had two."""
        self.jct_s = 0.0
        self.tokens = 0
        self.aborted = False
        self.failed = False

    @property
    def measured(self) -> dict[str, tuple[float | None, float | None]]:
        """What each objective is about, with the objective."""
        return {
            "ttft": (self.ttft_s, self.slo.ttft_s),
            "tbt": (self.max_tbt_s, self.slo.tbt_s),
            "jct": (self.jct_s, self.slo.e2e_s),
        }

    def outcomes(self) -> tuple[dict[str, Outcome], Outcome]:
        """Return the outcome of each objective that was set, and of all of them together."""
        found: dict[str, Outcome] = {
            name: self._outcome(value_s, objective_s)
            for name, (value_s, objective_s) in self.measured.items()
            if objective_s is not None
        }
        if self.aborted:
            return found, "aborted"
        return found, "missed" if "missed" in found.values() else "met"

    def _outcome(self, value_s: float | None, objective_s: float) -> Outcome:
        if self.aborted:
            return "aborted"
        # Without two outputs there is no gap to be too long; every ended sequence has a TTFT.
        return "missed" if self.failed or (value_s is not None and value_s > objective_s) else "met"

    def ended(self, times: SequenceTimes, reason: str) -> None:
        """Take over what a sequence saw; after the last one to end the request is counted."""
        self.left -= 1
        self.ttft_s = max(times.ttft_s, self.ttft_s or 0.0)
        if times.max_gap_s is not None:
            self.max_tbt_s = max(times.max_gap_s, self.max_tbt_s or 0.0)
        self.jct_s = max(times.jct_s, self.jct_s)
        self.tokens += times.tokens
        self.aborted = self.aborted or reason == _ABORT
        self.failed = self.failed or reason == _ERROR
        if self.left == 0:
            self._count(self)
