"""Preempt running requests when a better set of jobs fits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.contract import Admission, Candidate, Room, Step, Victim
from vllm_ext.contract.checks import require
from vllm_ext.policies.admission.in_order import take_while_they_fit
from vllm_ext.policies.admission.passing import PassAFew


@dataclass(frozen=True, kw_only=True)
class Preempting(Admission):
    """What selectors that preempt have in common: who may leave, and when that is worth what it costs.

    A waiting request that does not fit is given the seats and blocks of the running requests of worst rank, if
    normalised latency (seconds per output token, summed over requests) is expected to fall:

        gain = t / n_w                                              t: time until a seat frees by itself
        loss = sum over victims v of (t + c_v) / n_v + s_v * R * m  n: predicted output, c: time to restore v's KV,
                                                                    s: of that, what the others wait,
                                                                    R: running requests, m: mean of their 1 / n

    What is recomputed the others wait for, so s = c; with a KV tier both are shorter. A victim ranks after the request
    it makes room for, and one that was preempted before must have generated ``min_progress_tokens`` since.

    The cost term and the guard against thrashing are ours: ALISE swaps, and states no price.
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
    max_preempting: int = 4
    """Waiting requests per step for which others may leave, so that the cost of a step does not depend on the queue."""
    max_victims: int = 4
    """Victims for each."""

    def __post_init__(self) -> None:
        require(self.gain_ratio > 0, "admission.gain_ratio", self.gain_ratio, "greater than 0")
        for field in ("min_progress_tokens", "max_preempting", "max_victims"):
            value = getattr(self, field)
            require(value >= 1, f"admission.{field}", value, "an integer of at least 1")

    @property
    def preempts(self) -> bool:
        """Whether it preempts."""
        return self.preempt

    def make_room(self, step: Step, room: Room, candidates: Iterator[Candidate]) -> None:
        """Take the next candidates for whom it pays that others leave, until one finds no victims."""
        victims: Iterator[Victim] | None = None
        for count, candidate in enumerate(candidates):
            if count >= self.max_preempting or room.tokens < 1:  # a seat is worth nothing without a token
                return
            victims = victims or step.victims(behind=candidate.key)  # the next ones rank after it
            leaving = self._leaving(step, room, candidate, victims)
            if leaving is None:
                return
            room.take(candidate, leaving)

    def _leaving(
        self, step: Step, room: Room, candidate: Candidate, victims: Iterator[Victim]
    ) -> tuple[Victim, ...] | None:
        """Return whom to preempt for a candidate, nobody if it fits anyhow; None if it can't or is not worth it."""
        leaving: tuple[Victim, ...] = ()
        while not room.fits(candidate, leaving):
            if len(leaving) >= self.max_victims:
                return None
            victim = next((v for v in victims if self._may_leave(v)), None)
            if victim is None or candidate.key >= victim.key:
                return None
            leaving += (victim,)
        return leaving if not leaving or not self.priced or self._pays(step, candidate, leaving) else None

    def _may_leave(self, victim: Victim) -> bool:
        request = victim.request
        if self.spare_outlived and request.num_demotions:
            return False
        return not request.num_preemptions or request.progress_tokens >= self.min_progress_tokens

    def _pays(self, step: Step, candidate: Candidate, leaving: tuple[Victim, ...]) -> bool:
        best = step.best_running()
        if best is None:
            return False
        until_free_s = best.predicted_remaining_s
        gain = until_free_s / candidate.request.predicted_output_tokens
        mean_weight = (1 / best.predicted_output_tokens + 1 / leaving[0].request.predicted_output_tokens) / 2
        loss = sum(
            (until_free_s + v.restore_s) / v.request.predicted_output_tokens
            + v.stall_s * step.num_running * mean_weight
            for v in leaving
        )
        return gain > self.gain_ratio * loss


@dataclass(frozen=True, kw_only=True)
class Preemptive(Preempting):
    """Let the requests that rank first have the seats and the KV memory, when that is worth what it costs.

    Waiting requests are taken in rank order while they fit; for the next ones others are preempted, if that pays.

    Source: ALISE, section 3.2 and Algorithm 2 (the first M jobs in order belong on the GPU).
    """

    @property
    def uses_predictions(self) -> bool:
        """Whether predicted lengths are looked at: prices are made of them."""
        return self.priced

    def select(self, step: Step, room: Room) -> None:
        """Take those who fit in order, then those who fit if others leave."""
        candidates = step.waiting()
        refused = take_while_they_fit(room, candidates) if room.open else None
        if self.preempt:
            self.make_room(step, room, candidates if refused is None else itertools.chain((refused,), candidates))


@dataclass(frozen=True, kw_only=True)
class PassThenPreempt(PassAFew, Preempting):
    """What selectors have in common that take waiting requests as `PassAFew`, and then have others leave for some."""

    uses_predictions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        PassAFew.__post_init__(self)
        Preempting.__post_init__(self)

    def select(self, step: Step, room: Room) -> None:
        """Take those who fit, then those for whom others leave."""
        super().select(step, room)
        if self.preempt and (room.why or not room.open):
            joined = set(room.admit)
            self.make_room(step, room, (c for c in self._left_over(step) if c.req_id not in joined))

    def _left_over(self, step: Step) -> Iterator[Candidate]:
        """Yield waiting requests for whom others may leave, in order."""
        return step.waiting()
