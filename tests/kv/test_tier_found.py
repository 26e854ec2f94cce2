"""What the long walks found, each on its own with its story."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata, TransferJob
from vllm.v1.kv_offload.base import GPULoadStoreSpec, ReqContext
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from tests.support.tier_rig import MIN_BLOCKS, quiet
from vllm_ext.kv.eviction.retention import Chain
from vllm_ext.kv.host.manager import TierManager

from .disk_parts import key


def test_what_a_dropped_chunk_followed_can_be_evicted_again() -> None:
    """A store of a conversation's second chunk fails; its first chunk is then a tail, and must be found by evictions.

    Its place in the queue of tails is given up by the next eviction that meets it there, and nobody gave it back: with
    each failure a chunk stayed for ever, and stores failed although memory was in nobody's use.
    """
    manager = TierManager(3, cache_policy="retention")
    talk, other = ReqContext(req_id="talk"), ReqContext(req_id="other")
    talk.set_state(Chain({0: [key(1), key(2)]}, {0: 16}))
    for number in (1, 2):
        talk.set_offload_key_position(key(number), 16 * number)
    manager.prepare_store([key(1)], talk)
    manager.complete_store([key(1)], talk)
    stored = manager.prepare_store([key(2)], talk)
    assert stored is not None
    assert manager.prepare_store([key(3), key(4)], other) is None, "the first has a follower, the second is written"
    manager.mark_unreadable(stored.store_spec.block_ids.tolist())  # type: ignore[attr-defined]
    manager.complete_store([key(2)], talk)
    assert manager.prepare_store([key(3), key(4), key(5)], other) is not None


def test_a_cache_may_be_reset_twice_before_the_next_step() -> None:
    """vLLM's connector asserts that nothing is left to flush, which the first reset leaves to the next step."""
    rig = quiet()
    rig.add(range(100, 130), 20)
    while not rig.side._jobs:
        rig.step()
    for _ in range(2):
        rig.reset(running=False, connector=True)
    rig.drain()


def test_a_request_that_a_reset_preempts_may_load_in_the_next_step() -> None:
    """vLLM's connector asserts that a request preempted since the last step has no load, and a reset preempts.

    Its chunks are on the host, the device has forgotten them, so that the next step takes them from there.
    """
    rig = quiet()
    rig.add(range(100, 130), 20)
    while len(rig.loop.outcomes["r0"].token_ids) < 3 or rig.side._jobs:
        rig.step()
    assert rig.reset(running=True, connector=False)
    rig.step()
    assert any(not job.is_store for job in rig.side._jobs.values())
    rig.drain()
    assert len(rig.loop.outcomes["r0"].token_ids) == 20


@pytest.mark.parametrize("connector", [True, False])
@pytest.mark.parametrize("aborted", [True, False])
def test_a_reset_does_not_fail_while_a_load_is_under_way(connector: bool, aborted: bool) -> None:
    """vLLM raised: it had preempted who runs by then, and had reset neither the tier nor the device's prefix cache.

    So what had been computed with the old weights was found again with the new ones.
    """
    rig = quiet(slow=0.9, num_blocks=MIN_BLOCKS)
    rig.add(range(100, 130), 3)
    rig.settle()
    rig.add(range(200, 255), 3)  # takes the device's blocks
    rig.settle()
    rig.add(range(100, 130), 3)
    while not any(not job.is_store for job in rig.side._jobs.values()):
        rig.step()
    if aborted:
        rig.abort("r2")
    assert rig.reset(running=True, connector=connector)
    assert rig.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == MIN_BLOCKS - 1
    rig.add(range(300, 355), 3)  # into the blocks that the load still writes
    rig.drain()


def test_a_reset_that_fails_leaves_nothing_of_the_old_weights() -> None:
    """vLLM can't reset while a step is under way, whose blocks it keeps; it has preempted who runs by then.

    They would find what they had computed with the old weights, on the device or on the host, when they go on.
    """
    rig = quiet(async_scheduling=True)
    rig.add(range(100, 130), 20)
    while len(rig.loop.outcomes["r0"].token_ids) < 3 or not rig.loop.num_in_flight:
        rig.step()
    assert not rig.reset(running=True, connector=True)
    rig.drain()
    assert len(rig.loop.outcomes["r0"].token_ids) == 20


def test_a_failed_load_keeps_no_blocks_free_for_a_request_that_holds_none() -> None:
    """vLLM keeps blocks free for what a load under way will still compute, and went on when the load had failed.

    Its request had given back its blocks and waited behind others; those found too few blocks for loads of their own,
    although nothing ran: nobody ever moved again.
    """
    rig = quiet(failing_loads=1.0, prefix_caching=False)
    rig.add(range(100, 130), 3)
    rig.settle()
    rig.add(range(100, 130), 3)
    while "r1" not in rig.scheduler.failed_recving_kv_req_ids:
        rig.step()
    request = rig.scheduler.requests["r1"]
    assert request in rig.scheduler._inflight_prefills
    rig.scheduler._update_waiting_for_remote_kv(request)
    assert request not in rig.scheduler._inflight_prefills


def test_copies_from_before_a_reset_are_through_before_their_places_are_written_again() -> None:
    """A reset empties the books, and the next step waits for the copies that were under way.

    But a store that the same step can't do without (its blocks are taken at once) was handed to the worker before the
    wait: into a place of the pool from which a load still read.
    """
    rig = quiet()
    calls: list[tuple[str, Any]] = []
    rig.copies.submit_store = lambda job_id, *specs: calls.append(("store", job_id)) or True  # type: ignore[method-assign, func-returns-value]
    rig.copies.wait = lambda job_ids: calls.append(("wait", set(job_ids)))  # type: ignore[method-assign]
    job = TransferJob("r", GPULoadStoreSpec([1], group_sizes=[1], block_indices=[0]), CPULoadStoreSpec([0]))
    metadata = OffloadingConnectorMetadata(load_jobs={}, store_jobs={7: job}, jobs_to_flush={3, 7})
    rig.tier._connector.handle_preemptions(metadata)
    assert calls == [("wait", {3}), ("store", 7), ("wait", {7})]
