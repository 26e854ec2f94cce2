"""What is told of waiting: the engine's empty steps, and the workers' standing still."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

from vllm_ext.kv.connector.statistics import TierAccount
from vllm_ext.kv.connector.tiered import TierWorkerMetadata
from vllm_ext.kv.host.report import LOAD, STORE, WorkerReport
from vllm_ext.kv.host.worker import TierWorker

from .tier_worker_parts import SlowCodec, device, host

COMPUTES, LOADS, IDLES = 5, 0, -1
"""What a step does: computes so many tokens, or none while something is loaded, or none at all."""


@pytest.mark.parametrize(
    ("steps", "stalled_s"),
    [
        ([(COMPUTES, 0.0), "end", (LOADS, 1.0), "end", (LOADS, 1.5), "end", (COMPUTES, 3.0)], 2.0),
        ([(COMPUTES, 0.0), (LOADS, 1.0), "end", "end", (LOADS, 2.0), (COMPUTES, 2.5)], 0.5),
        ([(IDLES, 0.0), (COMPUTES, 9.0)], 0.0),
        ([(LOADS, 1.0), ("last", 1.25), (COMPUTES, 100.0)], 0.25),
    ],
    ids=["nobody computes", "beside one that computes", "nothing is loaded", "its request was aborted"],
)
def test_empty_steps_count_while_kv_is_loaded_and_nobody_computes(steps: list[Any], stalled_s: float) -> None:
    loading = SimpleNamespace(is_store=False)
    tier: Any = SimpleNamespace(_jobs={})
    account = TierAccount(tier, SimpleNamespace(), 1)  # type: ignore[arg-type]
    begun: list[int] = []
    for step in steps:
        if step == "end" or step[0] == "last":
            account.finished(begun.pop(0), lambda step=step: step == "end", step[1] if step != "end" else 0.0)
            continue
        tokens, now = step
        tier._jobs = {1: loading} if tokens == LOADS else {2: SimpleNamespace(is_store=True)}
        begun.append(max(0, tokens))
        account.scheduled(begun[-1], now)
    assert account.stalled_s == stalled_s


def test_reports_of_several_workers_add_up() -> None:
    one = TierWorkerMetadata({1: 1}, report=WorkerReport({3}, {5}, {1}, {STORE: 1.0, LOAD: 2.0}, {STORE: 3.0, LOAD: 4}))
    two = TierWorkerMetadata({1: 1}, report=WorkerReport({4}, {6}, {2}, {STORE: 0.5, LOAD: 0.25}, {STORE: 1, LOAD: 4}))
    merged = one.aggregate(two).aggregate(OffloadingWorkerMetadata({2: 1}))
    assert merged.completed_jobs == {1: 2, 2: 1}
    waits, codecs = {STORE: 1.5, LOAD: 2.25}, {STORE: 4.0, LOAD: 8.0}
    assert merged.report == WorkerReport({3, 4}, {5, 6}, {1, 2}, waits, codecs)
    assert (one.report.chunks, one.report.wait_s) == ({3}, {STORE: 1.0, LOAD: 2.0}), "what was reported is not changed"


def test_a_worker_tells_once_what_took_time() -> None:
    copies = SlowCodec()
    worker = TierWorker(copies, [[0]], chunk_bytes=100)
    worker.submit_store(1, device([1]), host([1]))
    assert copies.came.wait(10)
    copies.may_go.set()
    worker.submit_load(2, host([1]), device([2]))
    worker.wait({1, 2})
    report = worker.take_report()
    assert min(report.codec_s.values()) > 0
    assert set(report.wait_s.values()) == {0}, "that is for the engine's thread to say"
    assert worker.take_report() == WorkerReport()
    worker.shutdown()
