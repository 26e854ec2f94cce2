"""What an engine decides by, moved by its steps alone: it decides alike on every machine, whatever else that does.

The scheduler's clock, when it hears that a copy of KV is through, how long copies seem to take, and when a grammar has
been compiled. Copies are still made by threads of their own, beside the model: they are waited for, and held back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
    from vllm.v1.kv_offload.base import TransferResult

    from vllm_ext.kv.host.copies import Copy, LayerCopies
    from vllm_ext.kv.host.worker import TierWorker

_START_S = 2.0**24
"""Where clocks begin: the same in each run, to the last bit, and later than what the scheduler saw of the machine's."""
_STEP_S, _TOKEN_S, _PAIR_S = 0.005, 1e-4, 2e-7
"""What a step takes, each of its tokens, and each token that one of these attends to (ALISE eq. 4)."""
_BYTES_PER_S = 4e9
"""Which copies seem to move."""


def go_by_steps(scheduler: Any) -> None:
    """Give a scheduler of ours a clock that only its steps move, by their tokens."""
    from vllm_ext.simulation.engine.events import VirtualClock
    from vllm_ext.simulation.measure.run_data import Decision

    clock = VirtualClock(_START_S)
    if scheduler.holding is not None:
        scheduler.holding.price(1e10)
    finish_step = scheduler.update_from_output

    def timed(step: Any, output: Any) -> Any:
        did = Decision.of(step)
        rows = zip(did.scheduled, did.num_computed_tokens, strict=True)
        pairs = sum(num * (computed + num / 2) for (_, num), computed in rows)
        clock.advance(_STEP_S + _TOKEN_S * did.num_tokens + _PAIR_S * pairs)
        return finish_step(step, output)

    scheduler.clock, scheduler.update_from_output = clock, timed


class _AtOnce(Executor):
    """Does what it is given before it returns."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - who asks for the result is told
            done.set_exception(error)
        return done


def compile_grammars_at_once(core: Any) -> None:
    """Let no request wait for its grammar longer than another, by how busy the machine is."""
    core.structured_output_manager.executor = _AtOnce()


class _Reports:
    """What a worker has to report, and when: each copy at the end of the step behind the one in which it began."""

    def __init__(self) -> None:
        self._step = 0
        self._due: dict[int, int] = {}
        """Step at whose end a copy is reported, by its job."""
        self.ended: dict[int, Sequence[Copy]] = {}
        """By the first job of each report; changed by the worker's thread."""

    def began(self, job_id: int, *, in_step: bool = False) -> None:
        self._due[job_id] = self._step + (not in_step)

    def waited_for(self, job_ids: Iterable[int]) -> None:
        """Note that a step stood still for some, so that they are reported at its end."""
        self._due.update((job_id, self._step) for job_id in job_ids if job_id in self._due)

    def end_step(self) -> list[int]:
        """Return the jobs to report now, in the order in which they began."""
        due = sorted(job_id for job_id, step in self._due.items() if step <= self._step)
        self._step += 1
        for job_id in due:
            del self._due[job_id]
        return due


def hold_copies() -> None:
    """Let the tiers' copies end by steps, in this process and those forked from it: call it once.

    Those between host memory and the disk end with the step that looks for their end.
    """
    _hold_copies_to_host()
    _hold_copies_to_disk()


def _hold_copies_to_host() -> None:
    from vllm_ext.kv.host.worker import TierWorker

    known: WeakKeyDictionary[TierWorker, _Reports] = WeakKeyDictionary()
    submit, load_by_layer, wait, end, get_finished = (
        TierWorker._submit, TierWorker.load_by_layer, TierWorker.wait, TierWorker._end, TierWorker.get_finished,
    )  # fmt: skip

    def reports(worker: TierWorker) -> _Reports:
        return known.setdefault(worker, _Reports())

    def submitting(self: TierWorker, direction: int, job_id: int, *specs: Any) -> bool:
        reports(self).began(job_id)
        return submit(self, direction, job_id, *specs)

    def loading(self: TierWorker, jobs: Mapping[int, TransferJob]) -> LayerCopies:
        for job_id in jobs:
            reports(self).began(job_id, in_step=True)
        return load_by_layer(self, jobs)

    def waiting(self: TierWorker, job_ids: set[int]) -> None:
        reports(self).waited_for(job_ids)
        wait(self, job_ids)

    def ending(self: TierWorker, copies: Sequence[Copy]) -> None:
        with self._changed:
            reports(self).ended[copies[0].job_id] = copies  # several jobs may end at once
            self._open.difference_update(copy.job_id for copy in copies)
            self._changed.notify_all()

    def finished(self: TierWorker) -> list[TransferResult]:
        due = reports(self).end_step()
        wait(self, set(due))
        for job_id in due:
            end(self, reports(self).ended.pop(job_id, ()))
        return [_as_if(result) for result in get_finished(self)]

    changed = {
        "_submit": submitting, "load_by_layer": loading, "wait": waiting, "_end": ending, "get_finished": finished,
    }  # fmt: skip
    for name, method in changed.items():
        setattr(TierWorker, name, method)


def _as_if(result: TransferResult) -> TransferResult:
    """Return the result of a copy that took what its bytes say."""
    return replace(result, transfer_time=(result.transfer_size or 0) / _BYTES_PER_S)


def _hold_copies_to_disk() -> None:
    from vllm.v1.kv_offload.tiering.base import JobResult

    from vllm_ext.kv.disk.tier import DiskTier

    found = DiskTier.get_finished_jobs

    def finished(self: DiskTier) -> list[JobResult]:
        self._scanned.wait()
        self._pool.wait_idle()
        return sorted(found(self), key=lambda result: result.job_id)

    DiskTier.get_finished_jobs = finished  # type: ignore[method-assign]
