"""What is told of waiting: the engine's empty steps, and the workers' standing still."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

from vllm_ext.kv.connector.tiered import TierWorkerMetadata
from vllm_ext.kv.host.times import LoadStall, WorkerTimes
from vllm_ext.kv.host.worker import TierWorker

from .tier_worker_parts import SlowCodec, device, host


def test_empty_steps_count_while_kv_is_loaded_and_nobody_computes() -> None:
    stall = LoadStall()
    stall.scheduled(5, True, 0.0)
    stall.finished(5)
    stall.scheduled(0, True, 1.0)
    stall.finished(0)
    stall.scheduled(0, True, 1.5)
    stall.finished(0)
    stall.scheduled(7, False, 3.0)
    assert stall.seconds == 2.0
    assert not stall.is_open


def test_empty_steps_beside_one_that_computes_do_not_count() -> None:
    """Two steps are under way at once: the second is empty while the first one computes."""
    stall = LoadStall()
    stall.scheduled(5, True, 0.0)
    stall.scheduled(0, True, 1.0)
    stall.finished(5)
    stall.finished(0)
    stall.scheduled(0, True, 2.0)
    stall.scheduled(5, False, 2.5)
    assert stall.seconds == 0.5


def test_empty_steps_without_loads_do_not_count() -> None:
    stall = LoadStall()
    stall.scheduled(0, False, 0.0)
    stall.scheduled(5, False, 9.0)
    assert stall.seconds == 0.0


def test_an_engine_that_nobody_asks_anything_does_not_stand_still() -> None:
    stall = LoadStall()
    stall.scheduled(0, True, 1.0)
    stall.finished(0)
    assert stall.is_open
    stall.end(1.25)  # the request was aborted
    stall.scheduled(5, False, 100.0)
    assert stall.seconds == 0.25


def test_reports_of_several_workers_add_up() -> None:
    one = TierWorkerMetadata({1: 1}, unreadable={3}, times=WorkerTimes(1.0, 2.0, 3.0, 4.0))
    two = TierWorkerMetadata({1: 1}, unreadable={4}, times=WorkerTimes(0.5, 0.25, 0.125, 4.0))
    none = OffloadingWorkerMetadata({2: 1})
    merged = one.aggregate(two).aggregate(none)
    assert (merged.completed_jobs, merged.unreadable) == ({1: 2, 2: 1}, {3, 4})
    assert merged.times == WorkerTimes(1.5, 2.25, 3.125, 8.0)
    assert one.unreadable == {3}, "what was reported is not changed"
    assert one.times == WorkerTimes(1.0, 2.0, 3.0, 4.0)


def test_a_worker_tells_once_what_took_time() -> None:
    copies = SlowCodec()
    worker = TierWorker(copies, [[0]], chunk_bytes=100)
    worker.submit_store(1, device([1]), host([1]))
    assert copies.came.wait(10)
    copies.may_go.set()
    worker.submit_load(2, host([1]), device([2]))
    worker.wait({1, 2})
    times = worker.take_times()
    assert min(times.store_codec_s, times.load_codec_s) > 0
    assert times.store_wait_s == times.load_wait_s == 0, "that is for the engine's thread to say"
    assert worker.take_times() == WorkerTimes()
    worker.shutdown()
