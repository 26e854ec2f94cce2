"""Admit in the order of the queue while requests fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.policies.contract import Admission, Room, Step


@dataclass(frozen=True, kw_only=True)
class InOrder(Admission):
    """Take waiting requests in the order of the queue; the first one that does not fit ends the scan.

    This is vLLM's own rule, and left to vLLM where no gate stands.
    """

    uses_predictions: ClassVar[bool] = False
    is_vllms: ClassVar[bool] = True

    def select(self, step: Step, room: Room) -> None:
        """Take the first ones that fit."""
        if not room.open:
            return
        for candidate in step.waiting():
            if not room.fits(candidate):
                return
            room.take(candidate)
