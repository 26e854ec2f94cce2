"""What the commands that simulate say of requests and rows that are not served."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from vllm_ext.simulation.spec import SimulationSpec, limits_of
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
    return [*_rejections(max(runs, key=_share, default={}), spec), *_bad_rows(workload)]


def _rejections(metrics: Mapping[str, float], spec: SimulationSpec) -> Iterator[str]:
    if _share(metrics) > _TOLERATED:
        rejected, arrived = metrics["rejected_requests"], _arrived(metrics)
        context = limits_of(spec.engine, spec.hardware).max_model_len
        yield (
            f"incomplete: {rejected:.0f} of {arrived:.0f} requests ({rejected / arrived:.1%}) were rejected and count "
            f"as missed: their prompts fill the context of {context} tokens (--max-model-len)"
        )


def _bad_rows(workload: GeneratedWorkload) -> Iterator[str]:
    bad, rows = workload.source.bad_rows, workload.rows
    if bad > _TOLERATED * (bad + rows):
        yield f"incomplete: {bad} rows of {workload.name} cannot be read and were left out; {rows} are usable"


def _share(metrics: Mapping[str, float]) -> float:
    return metrics.get("rejected_requests", 0.0) / max(1.0, _arrived(metrics))


def _arrived(metrics: Mapping[str, float]) -> float:
    return sum(metrics.get(name, 0.0) for name in _ARRIVED)
