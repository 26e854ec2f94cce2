"""Admit a request only if the KV of its longest possible output can be reserved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.policies.checks import require
from vllm_ext.scheduling.plan import AdmissionPlan
from vllm_ext.scheduling.views import StepView

_NO_CHANGE = AdmissionPlan()


@dataclass(frozen=True, kw_only=True)
class ReserveMaximum:
    """Reserve the maximum length of every running request, so that none is ever preempted for memory.

    A waiting request starts if the blocks of prompt and ``max_tokens`` (cut at ``max_model_len``), summed over the
    requests that hold KV and itself, fit into the whole pool, and if the step's token budget holds its whole prompt
    beside what runs. A prompt longer than the budget can ever hold joins as the only one of its step. Requests are
    taken in the order of the queue; the first one that does not fit ends the scan.

    Source: Orca (OSDI '22), section 4.2 and Algorithm 1: a request is selected only if its ``max_tokens`` KV slots can
    be reserved; as "Orca (Max)" (reserve the model's longest sequence) the baseline of the vLLM and ALISE papers.
    """

    uses_predictions: ClassVar[bool] = False

    reserve_tokens: int = 0
    """Sequence length reserved for each request at least, in tokens; 0 reserves the client's own bound."""
    max_admissions: int = 32
    """Requests admitted per step at most."""

    def __post_init__(self) -> None:
        require(self.reserve_tokens >= 0, "admission.reserve_tokens", self.reserve_tokens, "0 or a number of tokens")
        require(self.max_admissions >= 1, "admission.max_admissions", self.max_admissions, "an integer of at least 1")

    def plan(self, step: StepView) -> AdmissionPlan:
        """Return the cap that admits exactly the requests whose maximum fits."""
        free_seats = step.max_running - step.num_running
        if not step.num_waiting or free_seats < 1:
            return _NO_CHANGE
        free_blocks = step.num_total_blocks - step.blocks_at_bound(self.reserve_tokens)
        free_tokens = step.num_free_tokens
        admitted = 0
        for head in step.waiting():
            free_blocks -= step.blocks_for(max(head.bound_tokens, self.reserve_tokens))
            tokens = head.num_tokens - head.num_computed_tokens
            alone = tokens > step.token_budget and not admitted and free_tokens > 0
            if free_blocks < 0 or not (tokens <= free_tokens or alone):
                break
            free_tokens -= tokens
            admitted += 1
            if admitted >= min(free_seats, self.max_admissions):
                break
        # Whatever it needs, one request alone always fits: vLLM sees to that when it starts.
        return AdmissionPlan(max_running=max(1, step.num_running + admitted))
