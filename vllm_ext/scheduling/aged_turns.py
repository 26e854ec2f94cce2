"""Turns of those who have waited longest: a share of all admissions, so that nobody waits without bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_ext.contract.aging import AGED_RANK

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_ext.contract import AgeLimit, Rank

_MOST_DUE = 8
"""Turns that add up where those who are due find no room."""
_ROUNDING = 1e-9


@dataclass(slots=True)
class AgedTurns:
    """Counts, for each client, the admissions of which its oldest requests are owed a share.

    Nothing is owed while nobody has waited beyond the limit.
    """

    limit: AgeLimit
    rank: Callable[[Request], Rank]
    """The place of one whose turn it is."""
    _owed: dict[str, float] = field(default_factory=dict)
    """By client: turns due."""

    @classmethod
    def of(cls, limit: AgeLimit | None, placed: Callable[[Rank, int], Rank]) -> AgedTurns | None:
        """Return the turns that an ordering asks for; None: it has no limit.

        Args:
            limit: The ordering's.
            placed: Returns a rank as it counts for a request of a priority.
        """
        return None if limit is None else cls(limit, lambda request: placed(AGED_RANK, request.priority))

    def admitted(self, client: str, *, aged: bool, by_turn: bool) -> None:
        """Note an admission.

        Args:
            client: Whose request joined.
            aged: Whether others of this client's have waited beyond the limit.
            by_turn: Whether the one that joined had its turn.
        """
        if not aged:
            self._owed.pop(client, None)
            return
        owed = self._owed.get(client, 0.0) + self.limit.share - by_turn
        self._owed[client] = min(max(owed, 0.0), _MOST_DUE)

    def due(self) -> dict[str, int]:
        """Return by client how many of its oldest requests go before all its others now, where there are any."""
        return {client: int(owed + _ROUNDING) for client, owed in self._owed.items() if owed + _ROUNDING >= 1}

    def forget(self, client: str) -> None:
        """Forget a client of which nobody waits."""
        self._owed.pop(client, None)
