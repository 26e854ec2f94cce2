"""Skip-join multi-level feedback queues: short requests first, without knowing which are short."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.contract import Ordering, Rank, RequestView
from vllm_ext.contract.checks import require
from vllm_ext.policies.ordering.aging import AGED_RANK, ages_at


@dataclass(frozen=True, kw_only=True)
class SkipJoin(Ordering):
    """Priority queues of doubling quantum; who used up a queue's quantum goes down one.

    A new request skips the queues whose quantum its first step would exceed: the time of its prefill is known. From
    there it is served for each queue's quantum in turn. What it was served so far is its prefill and one mean step per
    token. A request that waited ``starve_limit_s`` goes before all others, oldest first.

    Source: FastServe (arXiv 2305.05920), section 4.2: skip-join MLFQ, with a starvation limit. Its quanta come from the
    model's shortest step; promotion to the first queue there starts a new quantum, here it is kept while it runs.
    """

    uses_predictions: ClassVar[bool] = False

    num_levels: int = 5
    """Number of queues. Source: AccelGen's setting of FastServe, section 6.1."""
    base_quantum_s: float = 0.1
    """Quantum of the first queue, in seconds of service; each further one has twice that of the one before."""
    starve_limit_s: float = 30.0
    """Waiting time after which a request goes first, in seconds."""

    def __post_init__(self) -> None:
        require(self.num_levels >= 1, "ordering.num_levels", self.num_levels, "an integer of at least 1")
        for field in ("base_quantum_s", "starve_limit_s"):
            require(getattr(self, field) > 0, f"ordering.{field}", getattr(self, field), "seconds, greater than 0")

    @property
    def max_wait_behind_younger_s(self) -> float:
        """The aging bound: waiting time after which only older requests go before this one, in seconds."""
        return self.starve_limit_s

    def level(self, request: RequestView) -> int:
        """Return the queue of a request that did not starve, 0 (highest) to ``num_levels - 1``."""
        return self._level(request)[0]

    def _level(self, request: RequestView) -> tuple[int, float]:
        """Return the queue of a request, and what is left of its quantum in seconds."""
        level, quantum = 0, self.base_quantum_s
        while level < self.num_levels - 1 and quantum < request.prompt_s:
            level, quantum = level + 1, 2 * quantum
        served_s = request.prompt_s + request.num_output_tokens * request.pace.step_s
        while level < self.num_levels - 1 and served_s >= quantum:
            served_s -= quantum
            level, quantum = level + 1, 2 * quantum
        return level, quantum - served_s if level < self.num_levels - 1 else math.inf

    def rank(self, request: RequestView, now: float) -> Rank:
        """Return the place of ``request``: its queue, in order of arrival there."""
        if request.total_wait_s(now) >= self.starve_limit_s:
            return AGED_RANK
        level, left_s = self._level(request)
        ages_s = ages_at(request, self.starve_limit_s)
        used_up = request.num_output_tokens + max(1.0, left_s / request.pace.step_s)
        return Rank((float(level),), until_s=ages_s, until_tokens=used_up, older_only_s=ages_s, level=level)
