"""What the simulator reaches into of a scheduler of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_ext.scheduling.scheduler import SteeredScheduler


class Steered(Protocol):
    """The attributes by which time, predictions and counters are reached."""

    clock: Callable[[], float]
    """Replaced by virtual time."""
    tracked: Any
    observer: Any
    holding: Any
    """Keeps KV on the device in 8 bits, and is told how fast its memory is; None: nothing does."""

    def update_predictions(self, rows: Sequence[Sequence[Any]]) -> int:
        """Told what a predictor said."""
        ...


def steered(scheduler: Scheduler) -> Steered | None:
    """Return the scheduler as one of ours; None if it is vLLM's own.

    Raises:
        AttributeError: it is ours, but an attribute of `Steered` has another name there; without it the run would be of
            another system, and nothing would show it.
    """
    if not isinstance(scheduler, SteeredScheduler):
        return None
    for name in Steered.__annotations__:
        getattr(scheduler, name)
    return cast(Steered, scheduler)
