"""Admit a request only if the KV of its longest possible output can be reserved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.policies.admission.queue_scan import NO_CHANGE, PromptRoom, admit
from vllm_ext.policies.checks import require
from vllm_ext.scheduling.plan import AdmissionPlan
from vllm_ext.scheduling.views import RequestView, StepView


@dataclass(frozen=True, kw_only=True)
class ReserveMaximum:
    """Reserve the maximum length of every running request, so that none is ever preempted for memory.

    A waiting request starts if the blocks of prompt and ``max_tokens`` (cut at ``max_model_len``), summed over the
    requests that hold KV and itself, fit into the whole pool, and if the step's token budget holds its whole prompt
    beside what runs. A prompt longer than the budget can ever hold joins as the only one of its step. Requests are
    taken in the order of the queue; the first one that does not fit ends the scan.

    With ``overcommit`` the pool is taken to be larger than it is; with ``whole_prompts`` off a prompt may be computed
    in chunks, as vLLM does.

    Source: Orca (OSDI '22), section 4.2 and Algorithm 1: a request is selected only if its ``max_tokens`` KV slots can
    be reserved; as "Orca (Max)" (reserve the model's longest sequence) the baseline of the vLLM and ALISE papers;
    as "conservative", with overcommit, the baseline of Past-Future (arXiv 2507.10150), section 2.4 and Table 1.
    """

    uses_predictions: ClassVar[bool] = False

    reserve_tokens: int = 0
    """Sequence length reserved for each request at least, in tokens; 0 reserves the client's own bound."""
    overcommit: float = 1.0
    """Times the pool that may be reserved, at least 1."""
    whole_prompts: bool = True
    """Whether a prompt must fit into one step beside what runs."""
    max_admissions: int = 32
    """Requests admitted per step at most."""

    def __post_init__(self) -> None:
        require(self.reserve_tokens >= 0, "admission.reserve_tokens", self.reserve_tokens, "0 or a number of tokens")
        require(self.overcommit >= 1, "admission.overcommit", self.overcommit, "at least 1")
        require(self.max_admissions >= 1, "admission.max_admissions", self.max_admissions, "an integer of at least 1")

    def plan(self, step: StepView) -> AdmissionPlan:
        """Return the cap that admits exactly the requests whose maximum fits."""
        if not step.num_waiting or step.num_running >= step.max_running:
            return NO_CHANGE
        free_blocks = int(self.overcommit * step.num_total_blocks) - step.blocks_at_bound(self.reserve_tokens)
        room = PromptRoom(step)

        def fits(request: RequestView) -> bool:
            nonlocal free_blocks
            free_blocks -= step.blocks_for(max(request.bound_tokens, self.reserve_tokens))
            return (not self.whole_prompts or room.fits(request)) and free_blocks >= 0

        return admit(step, fits, self.max_admissions)
