"""Admit a prompt only if all of it fits into the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.policies.admission.queue_scan import NO_CHANGE, PromptRoom, admit
from vllm_ext.scheduling.plan import AdmissionPlan
from vllm_ext.scheduling.views import StepView


@dataclass(frozen=True, kw_only=True)
class WholePrompts:
    """Let prompts join the decodes uncut, in the order of the queue.

    A prompt longer than a step can ever hold joins as the only new one of its step, in chunks of the whole budget: with
    vLLM's ``--max-num-batched-tokens`` of at least ``--max-model-len`` there is none. Memory is left to vLLM.

    Source: Sarathi-Serve, section 5.2 and Table 4, ablation "hybrid-batching-only"; this is how Orca batches.
    """

    uses_predictions: ClassVar[bool] = False

    def plan(self, step: StepView) -> AdmissionPlan:
        """Return the cap that admits exactly the prompts that fit whole."""
        if not step.num_waiting or step.num_running >= step.max_running:
            return NO_CHANGE
        return admit(step, PromptRoom(step).fits, most=step.max_running)
