"""vLLM's own rules, one for each axis: what a system has where it says nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.contract import (
    Admission,
    Budget,
    Candidate,
    KvDisposition,
    Ordering,
    Origin,
    PreemptionCost,
    Rank,
    RequestView,
    Residency,
    Room,
    Sharing,
    Split,
    Step,
)
from vllm_ext.contract.checks import require

BY_ARRIVAL = Rank(())
"""The rank of every request; ties end in arrival."""


@dataclass(frozen=True, kw_only=True)
class Arrival(Ordering):
    """Order requests by arrival. Ties end in arrival anyway, so every key is the same."""

    uses_predictions: ClassVar[bool] = False

    def prices(self, decode_s: float, prefill_s: float) -> tuple[float, ...]:
        """Return nothing: no price changes the order of arrival."""
        return ()

    def rank(self, request: RequestView, now: float) -> Rank:
        """Return a rank that never expires and leaves the order to the arrival time."""
        return BY_ARRIVAL


def take_while_they_fit(room: Room, candidates: Iterator[Candidate]) -> Candidate | None:
    """Take candidates until one does not fit, and return that one; None if all did."""
    for candidate in candidates:
        if not room.fits(candidate):
            return candidate
        room.take(candidate)
    return None


@dataclass(frozen=True, kw_only=True)
class InOrder(Admission):
    """Take waiting requests in the order of the queue; the first one that does not fit ends the scan.

    This is vLLM's own rule, and left to vLLM where no gate stands.
    """

    uses_predictions: ClassVar[bool] = False

    kv_reserve: float = 0.0
    """Share of the device's blocks that admissions leave to running requests, as vLLM's ``--watermark``."""

    def __post_init__(self) -> None:
        require(0 <= self.kv_reserve < 1, "admission.kv_reserve", self.kv_reserve, "at least 0 and less than 1")

    @property
    def device_reserve(self) -> float:
        """Share of the device's blocks that admissions leave to running requests."""
        return self.kv_reserve

    @property
    def is_vllms(self) -> bool:
        """Not that of a class derived from it."""
        return type(self) is InOrder

    def select(self, step: Step, room: Room) -> None:
        """Take the first ones that fit."""
        if room.open:
            take_while_they_fit(room, step.waiting())


_NO_CHANGE = Split()


@dataclass(frozen=True, kw_only=True)
class StaticBudget(Budget):
    """Leave the budget at vLLM's ``max_num_batched_tokens``."""

    uses_predictions: ClassVar[bool] = False

    @property
    def is_vllms(self) -> bool:
        """Not that of a class derived from it."""
        return type(self) is StaticBudget

    def split(self, step: Step) -> Split:
        """Return no change."""
        return _NO_CHANGE


@dataclass(frozen=True, kw_only=True)
class Recompute(Residency):
    """No say in where KV lives: blocks of a preempted request are vLLM's to reuse.

    What its prefix cache still holds is found there. With a KV tier (``--kv-tier-gib``) whole chunks are copied to host
    memory when the tier's option ``store`` says so, for every request alike.
    """

    uses_predictions: ClassVar[bool] = False

    def on_preempt(self, request: RequestView, cost: PreemptionCost) -> KvDisposition:
        """Return the tier's own way for every request."""
        return KvDisposition.SWAP


@dataclass(frozen=True, kw_only=True)
class Undivided(Sharing):
    """Whoever sends most is served most."""

    uses_predictions: ClassVar[bool] = False
    divides: ClassVar[bool] = False

    def client(self, origin: Origin) -> str:
        """Return the same for all."""
        return ""
