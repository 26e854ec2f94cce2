"""Preempt running requests when a better set of jobs fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_ext.policies.admission.queue_scan import NO_CHANGE
from vllm_ext.policies.checks import require
from vllm_ext.scheduling.plan import AdmissionPlan
from vllm_ext.scheduling.views import RequestView, StepView


@dataclass(frozen=True, kw_only=True)
class BestSet:
    """Let the requests that rank first have the seats and the KV memory, when that is worth what it costs.

    Waiting requests are taken in rank order while the step has tokens for them. One that fits is left to vLLM. For one
    that does not, the running requests of worst rank are gathered until their seats and blocks suffice; they are
    preempted if normalised latency (seconds per output token, summed over requests) is expected to fall:

        gain = t / n_w                                              t: time until a seat frees by itself
        loss = sum over victims v of (t + c_v) / n_v + s_v * R * m  n: predicted output, c: time to restore v's KV,
                                                                    s: of that, what the others wait,
                                                                    R: running requests, m: mean of their 1 / n

    What is recomputed the others wait for, so s = c; with a KV tier both are shorter. A victim ranks after the request
    it makes room for, and one that was preempted before must have generated ``min_progress_tokens`` since.

    Source: ALISE, section 3.2 and Algorithm 2 (the first M jobs in order belong on the GPU). The cost term and the
    guard against thrashing are ours: the paper swaps, and states no price.
    """

    preempt: bool = True
    """Whether running requests may be preempted to admit better ones."""
    priced: bool = True
    """Whether a preemption must pay; False: whoever ranks first gets the place, as where KV is swapped for nothing."""
    gain_ratio: float = 1.0
    """The expected gain must exceed the loss this many times."""
    min_progress_tokens: int = 16
    """Output tokens a request must have generated since its last preemption before it can be preempted again."""
    spare_outlived: bool = False
    """Whether requests that outlived their estimate are never victims: what they have left nobody knows."""
    max_admissions: int = 4
    """Waiting requests considered per step, so that the cost of a step does not depend on the queue."""
    max_victims: int = 4
    """Victims per admission."""

    def __post_init__(self) -> None:
        require(self.gain_ratio > 0, "admission.gain_ratio", self.gain_ratio, "greater than 0")
        for field in ("min_progress_tokens", "max_admissions", "max_victims"):
            value = getattr(self, field)
            require(value >= 1, f"admission.{field}", value, "an integer of at least 1")

    @property
    def uses_predictions(self) -> bool:
        """Whether predicted lengths are looked at: prices are made of them."""
        return self.priced

    def plan(self, step: StepView) -> AdmissionPlan:
        """Return whom to preempt so that better-ranked waiting requests fit."""
        if not self.preempt or not step.num_waiting or not step.num_running:
            return NO_CHANGE
        free_seats = step.max_running - step.num_running
        free_blocks = step.num_free_blocks
        free_tokens = step.num_free_tokens  # a seat is worth nothing to a request that gets no token
        candidates = step.running_worst_first()
        preempt: list[str] = []
        for count, head in enumerate(step.waiting()):
            if count >= self.max_admissions or free_tokens < 1:
                break
            if free_seats < 1 or free_blocks < head.num_blocks:
                victims = self._victims(step, head, candidates, free_seats, free_blocks)
                if not victims:
                    break
                preempt += [v.req_id for v in victims]
                free_seats += len(victims)
                free_blocks += sum(v.num_blocks for v in victims)
            free_seats -= 1
            free_blocks -= head.num_blocks
            free_tokens -= head.num_prompt_tokens + head.num_output_tokens - head.num_computed_tokens
        return AdmissionPlan(preempt=tuple(preempt)) if preempt else NO_CHANGE

    def _victims(
        self, step: StepView, head: RequestView, candidates: Iterator[RequestView], free_seats: int, free_blocks: int
    ) -> list[RequestView]:
        """Return the victims that make ``head`` fit, or an empty list if there are none or they are not worth it."""
        victims: list[RequestView] = []
        for candidate in candidates:
            if not step.goes_before(head, candidate):
                return []
            if self.spare_outlived and candidate.num_demotions:
                continue
            if candidate.num_preemptions and candidate.progress_tokens < self.min_progress_tokens:
                continue
            victims.append(candidate)
            free_seats += 1
            free_blocks += candidate.num_blocks
            if free_seats >= 1 and free_blocks >= head.num_blocks:
                return victims if not self.priced or self._pays(step, head, victims) else []
            if len(victims) >= self.max_victims:
                return []
        return []

    def _pays(self, step: StepView, head: RequestView, victims: list[RequestView]) -> bool:
        best = step.running_best()
        if best is None:
            return False
        until_free_s = best.predicted_remaining_s
        gain = until_free_s / head.predicted_output_tokens
        mean_weight = (1 / best.predicted_output_tokens + 1 / victims[0].predicted_output_tokens) / 2
        loss = sum(
            (until_free_s + v.restore_s) / v.predicted_output_tokens + v.stall_s * step.num_running * mean_weight
            for v in victims
        )
        return gain > self.gain_ratio * loss
