"""The requests of a recorded run as a workload for the simulator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from vllm_ext.simulation.recorded_steps import Offsets, arrival_windows
from vllm_ext.simulation.recording import RecordingError, Run
from vllm_ext.simulation.recording_lines import Add, Update
from vllm_ext.simulation.requests import SimRequest


class RecordedWorkload:
    """All requests of a run under their clients' ids, those before the measured part included.

    Time starts with the first request. Measured requests arrive when they were due, later by the intake; the others,
    which no client timed, in the middle of when they can have. Lengths are those that came out.

    Args:
        run: A whole run.
        offsets: Of the front end.

    Raises:
        RecordingError: entries of the run are missing, a request did not end by itself or at its bound, or one
            uses what a simulation does not model.
    """

    def __init__(self, run: Run, offsets: Offsets) -> None:
        if run.dropped:
            raise RecordingError(f"{run.source}: {run.dropped} entries of the run of line {run.line} are missing")
        self.name = run.source
        self.sha256 = ""
        adds: list[Add] = list(run.of_type(Add))
        if not adds:
            raise RecordingError(f"{run.source}: the run of line {run.line} has no request")
        self.start_s = adds[0].at_s
        """The run's time 0 on the recording's clock."""
        lengths = _output_lengths(run)
        windows = arrival_windows(run)
        measured = {r.req_id: r for r in run.requests}
        self._requests = []
        for add, line in _with_lines(run):
            if add.unsupported:
                raise RecordingError(
                    f"{run.source}, line {line}: field 'unsupported': {', '.join(add.unsupported)} can't be simulated"
                )
            req_id = run.client_id(add.req_id)
            if add.req_id not in lengths:
                raise RecordingError(f"{run.source}, line {line}: {add.req_id} did not end by itself or at its bound")
            at_s = sum(windows[add.req_id]) / 2
            if req_id in measured:
                at_s = run.header.client_start_s + measured[req_id].arrival_s + offsets.intake_s
            self._requests.append(
                SimRequest(
                    req_id=req_id,
                    arrival_s=max(0.0, at_s - self.start_s),
                    prompt_tokens=len(add.prompt),
                    output_tokens=lengths[add.req_id],
                    max_tokens=add.max_tokens,
                    token_ids=add.prompt,
                    extra_args=add.extra_args,
                    priority=add.priority,
                    session_id=add.session_id,
                )
            )
        self._requests.sort(key=lambda request: request.arrival_s)  # stable: equal moments keep the recorded order
        self.rows = len(self._requests)

    def start(self) -> Iterator[SimRequest]:
        """Yield the requests by arrival."""
        return iter(self._requests)

    def after(self, request: SimRequest, finished_s: float, output_ids: Sequence[int]) -> Iterable[SimRequest]:  # noqa: ARG002 - as any workload's
        """Nobody waits for an answer to ask again: the recorded moments say it all."""
        return ()


def _with_lines(run: Run) -> Iterator[tuple[Add, int]]:
    for entry, line in zip(run.entries, run.lines, strict=True):
        if isinstance(entry, Add):
            yield entry, line


def _output_lengths(run: Run) -> dict[str, int]:
    """Tokens by vLLM's request id, of the requests that ended by themselves or at their bound."""
    counts: dict[str, int] = {}
    ended: dict[str, int] = {}
    for update in run.of_type(Update):
        for req_id, ids in update.tokens:
            if req_id not in ended:
                counts[req_id] = counts.get(req_id, 0) + len(ids)
        for req_id, reason in update.finished:
            if reason in ("stop", "length"):
                ended[req_id] = counts.get(req_id, 0)
    return ended
