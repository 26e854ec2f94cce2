"""Admit in the order of the queue while requests fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.contract import Admission, Candidate, Room, Step
from vllm_ext.contract.checks import require


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
