"""The checks of the long walks find what is broken on purpose."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_offload.base import TransferResult
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from tests.support import tier_rig
from tests.support.audit import AuditError
from tests.support.tier_rig import ChaosCopies
from tests.support.tier_walk import walk
from vllm_ext.kv.connector.tiered import TieredConnector
from vllm_ext.kv.host.manager import TierManager
from vllm_ext.scheduling import scheduler
from vllm_ext.simulation.cost.link import Direction

_STEPS = 20_000
"""More than any of these needs."""
_GET_FINISHED, _CONNECTOR_FINISHED = ChaosCopies.get_finished, OffloadingConnectorWorker.get_finished
_MAKE_REQUEST = tier_rig.make_request


def report_early(direction: Direction) -> Any:
    """Return a worker's report in which copies of one direction are through as soon as they are submitted."""

    def get_finished(copies: ChaosCopies) -> list[TransferResult]:
        told: set[int] = copies.__dict__.setdefault("told_early", set())
        early = [t.job_id for t in copies._begun.values() if t.direction is direction and t.job_id not in told]
        told.update(early)
        late = [result for result in _GET_FINISHED(copies) if result.job_id not in told]
        return late + [TransferResult(job_id, True) for job_id in early]

    return get_finished


def unheld_load(self: TierManager, keys: Any, req_context: Any, **options: Any) -> Any:
    """As vLLM's, without reference counts."""
    prepared = CPUOffloadingManager._prepare_load(self, keys, req_context, **options)
    CPUOffloadingManager.complete_load(self, keys, req_context)
    return prepared


def forget_loads(self: Any, finished: set[str]) -> tuple[set[str], set[str]]:
    loads = dict(self._load_jobs)
    sent, received = _CONNECTOR_FINISHED(self, finished)
    for job_id in loads.keys() - self._load_jobs.keys():
        self._connector_worker_meta.completed_jobs.pop(job_id)
    return sent, received - set(loads.values())


def unsalted(*args: Any, cache_salt: str | None = None, **options: Any) -> Any:
    """A request whose hasher forgets the salt."""
    request = _MAKE_REQUEST(*args, **options)
    request.cache_salt = cache_salt
    return request


def nothing(*_: object) -> None: ...


CHUNK_OVERWRITTEN = r"\(to_host\) writes block \d+, which job \d+ reads"
DISCARDS_NOTHING = [(scheduler, "discard_failed_loads", nothing)]
LOST_IN_STEP = {"load": "in-step", "failing_loads": 0.5}
OVERWRITTEN = r"writes block \d+, (which job \d+ reads|as another job does)"
BROKEN: dict[str, tuple[dict[str, Any], str, list[tuple[Any, str, Any]]]] = {
    "a store reported before it is through": (
        {"slow": 0.9},
        OVERWRITTEN + "|which holds nothing yet",
        [(ChaosCopies, "get_finished", report_early(Direction.TO_HOST))],
    ),
    "a load reported before it is through": (
        {"slow": 0.9},
        r"r\d+ reads block \d+|" + CHUNK_OVERWRITTEN,
        [(ChaosCopies, "get_finished", report_early(Direction.TO_DEVICE))],
    ),
    "a step that does not wait for the stores it overwrites": (
        {"slow": 0.9},
        OVERWRITTEN,
        [(ChaosCopies, "wait", nothing)],
    ),
    "a chunk evicted while it is loaded": (
        {"slow": 0.9, "host_chunks": 6},
        r"reference count 0, 1 loads|went while a copy used them",
        [(TierManager, "_prepare_load", unheld_load)],
    ),
    "which is seen by the copies too": (
        {"slow": 0.9, "host_chunks": 3, "store": "early"},
        CHUNK_OVERWRITTEN,
        [
            (TierManager, "_prepare_load", unheld_load),
            (TierManager, "complete_load", nothing),
            (tier_rig, "audit_tier", nothing),
        ],
    ),
    "an unreadable chunk that nobody is told of": (
        {"failing_stores": 0.5, "host_chunks": 40},
        r"\(to_device\) copies block \d+, which holds nothing yet",
        [(TierManager, "mark_unreadable", nothing)],
    ),
    "a failed load that nobody is told of": (
        {"failing_loads": 0.5, "host_chunks": 40},
        r"r\d+ reads block \d+",
        [(TieredConnector, "get_block_ids_with_load_errors", lambda _: set())],
    ),
    "a load that never ends": (
        {"host_chunks": 40},
        r"nothing scheduled in \d+ steps",
        [(OffloadingConnectorWorker, "get_finished", forget_loads)],
    ),
    "a chunk that is never let go": (
        {"host_chunks": 40},
        r"reference count 1, 0 loads",
        [(TierManager, "complete_load", nothing)],
    ),
    "a tier that gives one tenant another's KV": (
        {"host_chunks": 40},
        r"r\d+ reads block \d+",
        [(tier_rig, "make_request", unsalted)],
    ),
    "what was made of a failed load": (LOST_IN_STEP, "", DISCARDS_NOTHING),
    "what was made of it in an asynchronous engine": ({**LOST_IN_STEP, "async_scheduling": True}, "", DISCARDS_NOTHING),
}


@pytest.mark.parametrize(("options", "found", "broken"), BROKEN.values(), ids=BROKEN)
def test_it_is_found(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], found: str, broken: list[tuple[Any, str, Any]]
) -> None:
    for owner, name, replacement in broken:
        monkeypatch.setattr(owner, name, replacement, raising=False)
    with pytest.raises(AuditError, match=found):
        walk(_STEPS, 1, **options)
