"""The checks of the long walks find what is broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_offload.base import TransferResult
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from tests.support.audit import AuditError
from vllm_ext.kv.connector.tiered import TieredConnector
from vllm_ext.kv.host.manager import TierManager
from vllm_ext.simulation.cost.link import Direction

from . import tier_stateful_rig
from .tier_stateful_copies import ChaosCopies
from .tier_stateful_driver import walk

_STEPS = 20_000
"""More than any of these needs."""


def caught(match: str, **fixed: object) -> None:
    """A walk must end in a failed check whose message matches."""
    with pytest.raises(AuditError, match=match):
        walk(_STEPS, 1, **fixed)


def report_early(direction: Direction) -> Callable[[ChaosCopies], list[TransferResult]]:
    """Return a worker's report in which copies of one direction are through as soon as they are submitted."""
    on_time = ChaosCopies.get_finished

    def get_finished(copies: ChaosCopies) -> list[TransferResult]:
        told: set[int] = copies.__dict__.setdefault("told_early", set())
        early = [t.job_id for t in copies._begun.values() if t.direction is direction and t.job_id not in told]
        told.update(early)
        late = [result for result in on_time(copies) if result.job_id not in told or result.job_id in early]
        return [r for r in late if r.job_id not in early] + [TransferResult(job_id, True) for job_id in early]

    return get_finished


def test_a_store_reported_before_it_is_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are given to others, who overwrite what it still reads; or its chunk is loaded half-written."""
    monkeypatch.setattr(ChaosCopies, "get_finished", report_early(Direction.TO_HOST))
    caught(r"writes block \d+, (which job \d+ reads|as another job does)|which holds nothing yet", slow=0.9)


def test_a_load_reported_before_it_is_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request reads what is not there yet; or its chunk is given to a store, which overwrites what it reads."""
    monkeypatch.setattr(ChaosCopies, "get_finished", report_early(Direction.TO_DEVICE))
    caught(r"r\d+ reads block \d+|\(to_host\) writes block \d+, which job \d+ reads", slow=0.9)


def test_a_step_that_does_not_wait_for_the_stores_it_overwrites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChaosCopies, "wait", lambda self, job_ids: None)
    caught(r"writes block \d+, (which job \d+ reads|as another job does)", slow=0.9)


def test_a_chunk_evicted_while_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager forgets to hold what it hands out; seen by the books at once."""
    monkeypatch.setattr(TierManager, "_prepare_load", unheld_load, raising=False)
    caught(r"reference count 0, 1 loads|went while a copy used them", slow=0.9, host_chunks=6)


def test_a_chunk_evicted_while_it_is_loaded_is_seen_by_the_copies_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a look at the books: a store into the chunk meets the load out of it."""
    monkeypatch.setattr(TierManager, "_prepare_load", unheld_load, raising=False)
    monkeypatch.setattr(TierManager, "complete_load", lambda self, keys, req_context: None)
    monkeypatch.setattr(tier_stateful_rig, "audit_tier", lambda scheduler: None)
    caught(r"\(to_host\) writes block \d+, which job \d+ reads", slow=0.9, host_chunks=3, store="early")


def unheld_load(self: TierManager, keys: Any, req_context: Any, **options: Any) -> Any:
    """As vLLM's, without reference counts."""
    prepared = CPUOffloadingManager._prepare_load(self, keys, req_context, **options)
    CPUOffloadingManager.complete_load(self, keys, req_context)
    return prepared


def test_an_unreadable_chunk_that_nobody_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TierManager, "mark_unreadable", lambda self, chunk_ids: None)
    caught(r"\(to_device\) copies block \d+, which holds nothing yet", failing_stores=0.5, host_chunks=40)


def test_a_failed_load_that_nobody_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TieredConnector, "get_block_ids_with_load_errors", lambda self: set())
    caught(r"r\d+ reads block \d+", failing_loads=0.5, host_chunks=40)


def test_a_load_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request, and whoever wants the same chunks, wait for ever."""
    on_time = OffloadingConnectorWorker.get_finished

    def forgetful(self: Any, finished: set[str]) -> tuple[set[str], set[str]]:
        loads = dict(self._load_jobs)
        sent, received = on_time(self, finished)
        for job_id in loads.keys() - self._load_jobs.keys():
            self._connector_worker_meta.completed_jobs.pop(job_id)
        return sent, received - set(loads.values())

    monkeypatch.setattr(OffloadingConnectorWorker, "get_finished", forgetful)
    caught(r"nothing scheduled in \d+ steps", host_chunks=40)


def test_a_chunk_that_is_never_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TierManager, "complete_load", lambda self, keys, req_context: None)
    caught(r"reference count 1, 0 loads", host_chunks=40)


def test_a_tier_that_gives_one_tenant_anothers_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hasher that forgets the salt (invariant 5)."""
    make_request = tier_stateful_rig.make_request

    def unsalted(*args: Any, cache_salt: str | None = None, **options: Any) -> Any:
        request = make_request(*args, **options)
        request.cache_salt = cache_salt
        return request

    monkeypatch.setattr(tier_stateful_rig, "make_request", unsalted)
    caught(r"r\d+ reads block \d+", host_chunks=40)
