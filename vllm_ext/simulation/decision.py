"""What a step decided, in a form in which two runs can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm.v1.core.sched.output import SchedulerOutput


class Stalled(RuntimeError):
    """The loop took its last allowed step and work is still left."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What one ``schedule()`` decided; equal decisions are indistinguishable to a model runner."""

    scheduled: tuple[tuple[str, int], ...]
    """(request id, tokens) in scheduling order."""
    new: tuple[str, ...]
    resumed: tuple[str, ...]
    preempted: tuple[str, ...]
    num_computed_tokens: tuple[int, ...]
    """Per entry of ``scheduled``: tokens whose KV was there before the step, prefix hits included."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole step."""
        return sum(tokens for _, tokens in self.scheduled)

    @classmethod
    def of(cls, output: SchedulerOutput, scheduled: Mapping[str, int] | None = None) -> Decision:
        """Return what a step of vLLM's scheduler decided; only about those with tokens in ``scheduled``, if given."""
        tokens = output.num_scheduled_tokens if scheduled is None else scheduled
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return cls(
            scheduled=tuple(tokens.items()),
            new=tuple(new.req_id for new in output.scheduled_new_reqs),
            resumed=tuple(r for r in cached.req_ids if r in cached.resumed_req_ids),
            preempted=tuple(sorted(output.preempted_req_ids or ())),
            num_computed_tokens=tuple(computed[r] for r in tokens),
        )
