"""What a workload offers to a simulated server: requests with their hidden lengths, and who sends the next one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_ext.contract.objective import NO_SLO, Slo

__all__ = ["NO_SLO", "SimRequest", "Slo", "Workload", "all_requests"]


@dataclass(slots=True, kw_only=True)
class SimRequest:
    """One request of a workload. ``output_tokens`` is hidden from every policy (invariant 1)."""

    req_id: str
    """Unique within a run."""
    arrival_s: float
    """When it reaches the server, in seconds from the start of the run."""
    prompt_tokens: int
    """Prompt length, at least 1."""
    output_tokens: int
    """True output length, at least 1; the run cuts it at ``max_tokens`` and at the model's context."""
    max_tokens: int
    """The client's bound on the output."""
    token_ids: Sequence[int] | None = None
    """The prompt's ids, ``prompt_tokens`` of them; None: ids of its own making that no other request shares."""
    recorded_ids: bool = False
    """Whether ``token_ids`` are those of a prompt that was written, in the ids of the model that served it."""
    extra_args: Mapping[str, Any] | None = None
    """What the client sends as ``vllm_xargs``: hints such as ``osl``. Never the true length."""
    priority: int = 0
    """vLLM's priority: lower goes first."""
    session_id: str | None = None
    """Conversation the request belongs to."""
    slo: Slo = NO_SLO
    """What the client expects; used to judge the run."""
    tier: str = ""
    """Class of service, for metrics per tier."""
    tenant: str = ""
    """Who sent it, as it was recorded, for who pays."""
    abort_after_s: float | None = None
    """The client disconnects this long after the arrival, if it still waits; None: never."""
    patience_s: float | None = None
    """The same, if it has no token by then; whoever has one stays."""
    prompt: str | None = None
    """Prompt text, where the length predictor needs it."""
    predicted: tuple[int, ...] | None = None
    """Quantiles of its output length at `LEVELS`, in tokens: the scheduler is told them as its predictor's."""
    meta: dict[str, Any] = field(default_factory=dict)
    """For the workload's own books (turn number, source row); the run passes it on unread."""


class Workload(Protocol):
    """A source of requests. Deterministic: two iterations give the same requests."""

    name: str
    """File or preset, for reports."""
    rows: int
    """Rows of the underlying data."""
    sha256: str
    """Checksum of the underlying data."""

    def start(self) -> Iterator[SimRequest]:
        """Yield the requests whose arrival does not depend on the run, by arrival time, lazily."""
        ...

    def after(self, request: SimRequest, finished_s: float, output_ids: Sequence[int]) -> Iterable[SimRequest]:
        """Return what its client sends next, now that a request has ended: the next turn of a conversation, say.

        Args:
            request: The request that ended.
            finished_s: When its client saw the end, in seconds.
            output_ids: The tokens it generated; empty or short if it was aborted.

        Returns:
            Requests that arrive at ``finished_s`` or later.
        """
        ...


def all_requests(workload: Workload) -> list[SimRequest]:
    """Return every request of a workload, a conversation's one after the other, as if each were answered at once.

    What a turn says, asks for and expects does not depend on when it is answered, but its arrival does.
    """
    found = []
    for opening in workload.start():
        following: SimRequest | None = opening
        while (one := following) is not None:
            found.append(one)
            answer = [0] * min(one.output_tokens, one.max_tokens)
            following = next(iter(workload.after(one, one.arrival_s, answer)), None)
    return found
