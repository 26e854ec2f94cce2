"""A policy of one's own: highest response ratio next.

    vllm serve MODEL --ext-modules response_ratio --scheduler-cls response-ratio

with this file's folder on PYTHONPATH.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ext.contract import Ordering, Rank, RequestView
from vllm_ext.contract.checks import require
from vllm_ext.systems import System, register


@dataclass(frozen=True, kw_only=True)
class ResponseRatio(Ordering):
    """Order requests by (wait + service) / service, highest first: short jobs lead, long ones catch up by waiting.

    Source: Brinch Hansen's highest response ratio next; the service time is ALISE's estimate.
    """

    refresh_s: float = 1.0
    """Seconds after which the rank of a waiting request is computed again."""

    def __post_init__(self) -> None:
        require(self.refresh_s > 0, "ordering.refresh_s", self.refresh_s, "seconds, greater than 0")

    def rank(self, request: RequestView, now: float) -> Rank:
        """Return the negated response ratio: the lowest key goes first."""
        service_s = max(request.predicted_remaining_s, 1e-6)
        ratio = 1 + request.total_wait_s(now) / service_s
        return Rank((-ratio, service_s), until_s=now + self.refresh_s)


register(System(name="response-ratio", ordering=ResponseRatio, summary="highest response ratio next"))
