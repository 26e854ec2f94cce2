"""What the commands that simulate say of requests and rows that are not served."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm_ext.simulation.spec import SimulationSpec, resolve
from vllm_ext.simulation.workloads.build import GeneratedWorkload

_TOLERATED = 0.001
"""Share that may be left out of a result that is complete."""
_ARRIVED = ("requests", "aborted_requests", "unfinished_requests", "rejected_requests")


def lines(runs: Iterable[Mapping[str, float]], spec: SimulationSpec, workload: GeneratedWorkload) -> list[str]:
    """Return a line on each kind of thing that was left out; none where the result is complete.

    Args:
        runs: Metrics of runs; the one with the most rejected requests counts.
        spec: The description of one of them; all have the same context.
        workload: What they served.
    """
    counts = [(run.get("rejected_requests", 0.0), sum(run.get(name, 0.0) for name in _ARRIVED)) for run in runs]
    rejected, arrived = max(counts, key=lambda count: count[0] / max(1.0, count[1]), default=(0.0, 0.0))
    bad, rows = workload.source.bad_rows, workload.rows
    said = []
    if rejected > _TOLERATED * arrived:
        context = resolve(spec).limits.max_model_len
        said.append(
            f"incomplete: {rejected:.0f} of {arrived:.0f} requests ({rejected / arrived:.1%}) were rejected and count "
            f"as missed: their prompts fill the context of {context} tokens (--max-model-len)"
        )
    if bad > _TOLERATED * (bad + rows):
        said.append(f"incomplete: {bad} rows of {workload.name} cannot be read and were left out; {rows} are usable")
    return said
