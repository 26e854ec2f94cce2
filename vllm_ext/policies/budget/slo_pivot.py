"""A token budget in proportion to the tightest objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.contract import Budget, RequestView, Split, Step
from vllm_ext.contract.slack import READING_TBT_S, job_step_s, ttft_s
from vllm_ext.policies.budget.tbt import TbtBudget, fitting_prompt_tokens

_RULE = TbtBudget()


@dataclass(frozen=True, kw_only=True)
class SloPivotBudget(Budget):
    """Scale the step at which throughput saturates to the tightest objective of those who run.

        S_b = S_pf * SLO_min / T_pf        S_pf: tokens of the saturated step, T_pf: its duration
                                           SLO_min: tightest TBT objective, the reading speed where nobody has one;
                                           with ``every_objective`` also the tightest TTFT of unfinished prompts,
                                           and what a step of a job may take

    Computed anew for every step; prompts are cut where exactly S_b is reached (vLLM cuts the last one). Contexts are
    not in the formula: a step of long contexts takes longer than it says. So with ``fitted`` no more is granted than
    keeps the step within 0.9 of the objective by the step-time model.

    Source: AccelGen, section 4.2 and equation 6, Algorithm 2; ``fitted`` is ours, by the rule of `TbtBudget`. So are
    two omissions, which the published row undoes. A TTFT objective spans many steps of a long prompt, and those of
    short ones are often less than a step that decodes. And a prompt that starts without KV for all of it may stop half
    way, for want of what others hold who wait for the same.
    """

    uses_predictions: ClassVar[bool] = False
    stall_free: ClassVar[bool] = True

    fitted: bool = True
    """Whether contexts are looked at as well."""
    every_objective: bool = False
    """Whether SLO_min covers TTFT objectives too, of prompts that run unfinished and of the first one that waits, and
    those of whole jobs that run, spread evenly over their steps. Cost: a look at everybody who runs."""
    within_kv: bool = False
    """Whether a step gets no more prompt tokens than there are free KV slots, so that prompts, those that start
    included, are cut to these too."""

    @property
    def starts_partly(self) -> bool:
        """Whether a prompt may start before there is KV for all of it."""
        return self.within_kv

    def split(self, step: Step) -> Split:
        """Return S_b, and at least a token for everybody who decodes and one for a prompt."""
        objective_s = self.objective_s(step)
        tokens = pivot_tokens(step, objective_s)
        if self.fitted and step.num_decoding:
            fitting = fitting_prompt_tokens(step, _RULE.safety * objective_s)
            tokens = min(tokens, step.decode_tokens + max(fitting, _RULE.min_prefill_tokens))
        if self.within_kv:
            blocks_per_token = sum(1 / size for size in step.pool.block_sizes)
            tokens = min(tokens, step.decode_tokens + int(step.pool.unused / blocks_per_token))
        return Split(tokens=max(tokens, step.decode_tokens + 1))

    def objective_s(self, step: Step) -> float:
        """Return SLO_min, in seconds."""
        tightest = step.tbt_s(READING_TBT_S)
        if not self.every_objective:
            return tightest
        first, unfinished = next(step.waiting(), None), step.prefilling()
        prompts = [*unfinished, *(() if first is None else (first.request,))]
        jobs = [
            job_step_s(request, request.slo.e2e_s)
            for request in (*unfinished, *step.decoding())
            if request.slo.e2e_s is not None
        ]
        return min([tightest, *map(_next_token_s, prompts), *jobs])


def pivot_tokens(step: Step, objective_s: float) -> int:
    """Return S_b, in tokens."""
    pivot = step.runtime.pivot
    return int(pivot.tokens * objective_s / pivot.step_s)


def _next_token_s(request: RequestView) -> float:
    """Return the objective of a request's next token: its first one, or one after a preemption."""
    if not request.num_output_tokens:
        return ttft_s(request)
    return READING_TBT_S if request.slo.tbt_s is None else request.slo.tbt_s
