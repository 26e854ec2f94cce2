"""Clients that leave at a chosen moment of their request's life: for engines whose core lives in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.v1.request import RequestStatus

PHASES: Mapping[str, Callable[[Any], bool]] = {
    "waiting": lambda r: r.status is RequestStatus.WAITING and not r.num_computed_tokens,
    "prefilling": lambda r: _runs(r) and 0 < r.num_computed_tokens < r.num_prompt_tokens,
    "decoding": lambda r: _runs(r) and r.num_output_tokens > 0,
    "preempted": lambda r: r.status is RequestStatus.PREEMPTED,
    "loading": lambda r: r.status is RequestStatus.WAITING_FOR_REMOTE_KVS,
}
"""What a request does, by what the scheduler knows of it."""


def _runs(request: Any) -> bool:
    return request.status is RequestStatus.RUNNING


class Leavers:
    """Aborts a request in each phase.

    Attributes:
        left: Phase in which each of them was aborted, by its id.
        fullest: Largest share of the device's KV blocks that was in use before a step.
    """

    def __init__(self, engine: Any, core: Any, among: Mapping[str, Sequence[str]]) -> None:
        """Remember what to do.

        Args:
            engine: What clients talk to.
            core: The engine core.
            among: By phase, requests of which one is aborted, as soon as one is in it.
        """
        self._engine, self._core = engine, core
        self._among = {phase: frozenset(names) for phase, names in among.items()}
        self.left: dict[str, str] = {}
        self.fullest = 0.0

    def before_step(self) -> None:
        """Abort one in each phase in which none was aborted."""
        self.fullest = max(self.fullest, self._core.scheduler.kv_cache_manager.usage)
        for phase in self._among.keys() - set(self.left.values()):
            if (name := self._one_in(phase)) is not None:
                self.left[name] = phase
                self._engine.abort_request([name])

    def _one_in(self, phase: str) -> str | None:
        for req_id, request in self._core.scheduler.requests.items():
            name = req_id.rpartition("-")[0]  # vLLM adds a random part to what the client called it
            if name in self._among[phase] and name not in self.left and PHASES[phase](request):
                return name
        return None
