"""Admit in order, past a few that do not fit, for a short time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.contract import Admission, Room, Step
from vllm_ext.contract.checks import require

_NOTE = "passing.since"
_NOTED = 256


@dataclass(frozen=True, kw_only=True)
class PassAFew(Admission):
    """Take waiting requests in order; one that does not fit is passed by others for a while, and then holds them up.

    A short prompt need not wait until there is room for the long one before it, but passed without bound the long one
    starves. One whose objective presses holds nobody up: soon it has joined, or its objective is lost. Nobody is
    preempted for those who wait; running requests keep a reserve of KV blocks to grow into.
    """

    uses_predictions: ClassVar[bool] = False

    kv_reserve: float = 0.05
    """Share of the device's blocks that admissions leave to running requests, as vLLM's ``--watermark``."""
    max_passed: int = 16
    """Requests that may be passed over in one step because they do not fit."""
    passed_s: float = 2.0
    """How long one may be passed since it first did not fit, in seconds."""

    def __post_init__(self) -> None:
        require(0 <= self.kv_reserve < 1, "admission.kv_reserve", self.kv_reserve, "at least 0 and less than 1")
        require(self.max_passed >= 0, "admission.max_passed", self.max_passed, "an integer of at least 0")
        require(self.passed_s >= 0, "admission.passed_s", self.passed_s, "seconds, at least 0")

    @property
    def device_reserve(self) -> float:
        """Share of the device's blocks that admissions leave to running requests."""
        return self.kv_reserve

    def select(self, step: Step, room: Room) -> None:
        """Take those who fit."""
        since: dict[str, float] = step.memo.setdefault(_NOTE, {})
        passed: list[str] = []
        for candidate in step.waiting() if room.open else ():
            if room.fits(candidate):
                room.take(candidate)
                since.pop(candidate.req_id, None)
                if not room.open:
                    break
                continue
            passed.append(candidate.req_id)
            holds = candidate.aged or (
                not candidate.presses and step.now - since.setdefault(candidate.req_id, step.now) > self.passed_s
            )
            if holds or len(passed) > self.max_passed:
                break
        if len(since) > _NOTED:  # those who are gone
            for req_id in since.keys() - set(passed):
                del since[req_id]
