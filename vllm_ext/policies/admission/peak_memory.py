"""Admit a request if the memory that everybody will need fits at its predicted peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_ext.policies.admission.peak import Peak
from vllm_ext.policies.admission.queue_scan import NO_CHANGE, admit, nobody
from vllm_ext.policies.checks import require
from vllm_ext.scheduling.plan import AdmissionPlan
from vllm_ext.scheduling.views import Batch, RequestView, StepView

Lengths = npt.NDArray[np.int64]

_REFUSED = "peak_memory.refused"
HISTORY, PREDICTED = "history", "predicted"
_FORECASTS = (HISTORY, PREDICTED)


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Let the next request join only if the predicted peak of KV memory stays within the pool.

    Every step, output lengths are drawn from those of the last ``window`` finished requests: for a waiting request from
    P(l), for one that generated g tokens from P(l | l > g). From the lengths follows when each request ends and how
    much memory all others hold by then; the highest such sum is the peak (`Peak`). Requests are taken in the order of
    the queue until one does not fit.

    Small batches are drawn several times, and the highest peak counts: their sum of lengths is uncertain. Until
    ``cold_requests`` have finished, a part of the lengths drawn is the client's bound: everything, before the first
    one. A request that has outlived all history is expected to double, at most to its bound.

    Memory is counted in the pool's blocks. Prefix blocks that several requests share count once; as sharers finish, the
    saving is reduced in proportion, which is exact for one common prefix. What a waiting request would share with
    running ones costs it nothing.

    Source: Past-Future (arXiv 2507.10150), section 3, equations 1-4, Algorithm 1 and section 4. Blocks, sharing and
    ``stratify`` are ours; with ``stratify`` the draws of a step are spread evenly over the distribution, so that their
    sum varies less.
    """

    reserve: float = 0.05
    """Share of the pool that the predicted peak must leave free, at least 0 and less than 1."""
    forecast: str = HISTORY
    """Where lengths come from: ``history``, drawn as above, or ``predicted``, each request's own estimate."""
    window: int = 1000
    """Finished requests remembered."""
    cold_requests: int = 10
    """Finished requests from which on the history alone is believed."""
    least_draws: int = 256
    """Draws per step at least: a batch of fewer requests is drawn several times."""
    most_repeats: int = 5
    """How often a batch is drawn at most."""
    stratify: bool = True
    """Whether the draws of a step are spread evenly over the distribution."""
    max_admissions: int = 32
    """Requests admitted per step at most."""
    redraw_steps: int = 4
    """Steps for which it stands that nobody fits, unless who runs or who waits changes; 1: drawn again every step."""

    def __post_init__(self) -> None:
        require(0 <= self.reserve < 1, "admission.reserve", self.reserve, "at least 0 and less than 1")
        require(self.forecast in _FORECASTS, "admission.forecast", self.forecast, f"one of {', '.join(_FORECASTS)}")
        for field in ("window", "least_draws", "most_repeats", "max_admissions", "redraw_steps"):
            require(getattr(self, field) >= 1, f"admission.{field}", getattr(self, field), "an integer of at least 1")
        require(self.cold_requests >= 0, "admission.cold_requests", self.cold_requests, "an integer of at least 0")

    @property
    def uses_predictions(self) -> bool:
        """Whether predicted lengths are looked at."""
        return self.forecast == PREDICTED

    def plan(self, step: StepView) -> AdmissionPlan:
        """Return the cap that admits exactly the requests whose peak fits."""
        if not step.num_waiting or step.num_running >= step.max_running:
            return NO_CHANGE
        if step.num_free_blocks < 1:  # vLLM's own rule, which foresees nothing, might find some in the step
            return nobody(step) if step.num_running else NO_CHANGE
        if self.stands(step):
            return nobody(step)
        plan = admit(step, Forecast(self, step).admits, self.max_admissions)
        if plan.max_running == step.num_running:
            self.note(step)
        return plan

    def note(self, step: StepView) -> None:
        """Note that nobody fits."""
        step.notes[_REFUSED] = Refusal(step.number, step.membership, step.queue_changes)

    def stands(self, step: StepView) -> bool:
        """Say whether an earlier step's answer, that nobody fits, still stands.

        The moments at which requests of one draw end, and the memory held then, stay where they are while everybody
        who runs advances by a token a step.
        """
        last: Refusal | None = step.notes.get(_REFUSED)
        return (
            last is not None
            and step.number - last.step < self.redraw_steps
            and step.membership == last.membership
            and step.queue_changes == last.queue_changes
        )


class Refusal(NamedTuple):
    """When nobody fitted."""

    step: int
    membership: int
    queue_changes: int


class Forecast:
    """The peaks of one step, one per repeat of the draw; grows as requests are admitted."""

    def __init__(self, policy: PeakMemory, step: StepView) -> None:
        self._policy = policy
        self._step = step
        self._history = step.finished_lengths()
        cold = policy.cold_requests
        # The upper end of the distribution is the bound while little is known.
        self._known = min(1.0, len(self._history) / cold) if cold else float(len(self._history) > 0)
        batch = step.batch()
        expected = step.num_running + 1
        repeats = 1
        if policy.forecast == HISTORY:
            repeats = min(policy.most_repeats, max(1, -(-policy.least_draws // expected)))
        block = step.block_size
        self._capacity = (1 - policy.reserve) * step.num_total_blocks * block
        used = step.num_total_blocks - step.num_unused_blocks
        held = int((-(-batch.computed // block)).sum()) if expected > 1 else 0
        # Positive: blocks that others than the running hold. Negative: blocks that running ones share.
        extra = (used - held) * block
        self._peaks = [
            Peak(batch.tokens, self._remaining(batch), rounding=(block - 1) / 2, extra=extra) for _ in range(repeats)
        ]

    @property
    def tokens(self) -> float:
        """The highest of the peaks, in tokens."""
        return max(peak.tokens for peak in self._peaks)

    def admits(self, request: RequestView) -> bool:
        """Take the request in if every peak with it fits; it stays out otherwise."""
        tokens = request.num_tokens - self._step.cached_blocks_in_use(request) * self._step.block_size
        drawn = [self._remaining_of(request) for _ in self._peaks]
        for peak, remaining in zip(self._peaks, drawn, strict=True):
            if peak.with_one_more(tokens, remaining) > self._capacity:
                return False
        for peak, remaining in zip(self._peaks, drawn, strict=True):
            peak.add(tokens, remaining)
        return True

    def _remaining(self, batch: Batch) -> Lengths:
        if self._policy.forecast == PREDICTED:
            lengths = self._step.predicted_lengths()
        else:
            lengths = self._draw(batch.generated, batch.max_tokens)
        return np.maximum(np.minimum(lengths, batch.max_tokens) - batch.generated, 1)

    def _remaining_of(self, request: RequestView) -> int:
        generated, bound = request.num_output_tokens, request.max_tokens
        if self._policy.forecast == PREDICTED:
            length = request.predicted_output_tokens
        else:
            length = self._draw_one(generated, bound)
        return max(min(length, bound) - generated, 1)

    def _draw_one(self, generated: int, bound: int) -> int:
        """`_draw` for a single request."""
        history, uniform, known = self._history, self._step.rng.random(), self._known
        if uniform >= known:
            return bound
        first = int(history.searchsorted(generated, side="right"))
        left = len(history) - first
        return int(history[first + int(uniform / known * left)]) if left else 2 * generated

    def _draw(self, generated: Lengths, bound: Lengths) -> Lengths:
        """Draw a length above ``generated`` for each request, shape [requests]."""
        count, history, policy = len(generated), self._history, self._policy
        uniform = self._step.rng.random(count)
        if policy.stratify and count > 1:
            uniform = (self._step.rng.permutation(count) + uniform) / count
        known = self._known
        if known == 0:
            return bound
        first = history.searchsorted(generated, side="right")
        left = len(history) - first
        if known < 1:
            certain, uniform = uniform < known, np.minimum(uniform / known, 1 - 1e-12)
        place = first + (uniform * left).astype(np.int64)
        if left.all():
            drawn = history[place]
        else:
            drawn = np.where(left > 0, history[np.minimum(place, len(history) - 1)], 2 * generated)
        return drawn if known == 1 else np.where(certain, drawn, bound)
