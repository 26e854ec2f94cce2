"""Loads within a step: the layers' order, who waits for what, who makes way, and what becomes of failures."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata, TransferJob

from vllm_ext.config.kv_tier import LOSSLESS, QUANTISED, KvTierConfig
from vllm_ext.kv.connector.options import transfer_config
from vllm_ext.kv.connector.step_loads import TierMetadata, between_s, exposed_s, in_step_is_cheaper
from vllm_ext.kv.connector.tiered import TieredConnector
from vllm_ext.kv.connector.worker import LayerwiseWorker
from vllm_ext.kv.host.worker import TierWorker

from .tier_worker_parts import LAYOUT, Stepped, codec, device, host, random_kv, stepped_worker

LAYERS = 3


@pytest.fixture
def stepped() -> Iterator[Stepped]:
    yield from stepped_worker(LAYERS)


def jobs(*numbers: int) -> dict[int, TransferJob]:
    """Load ``number`` brings the chunk of that number into the block of that number."""
    return {number: TransferJob(f"r{number}", host([number]), device([number])) for number in numbers}


# --- the worker -----------------------------------------------------------------------------------------------------


def test_all_loads_of_a_layer_come_before_those_of_the_next(stepped: Stepped) -> None:
    copies, worker = stepped
    copies.go()
    worker.load_by_layer(jobs(1, 2))
    worker.wait({1, 2})
    assert copies.calls == [("load", layer, [number]) for layer in range(LAYERS) for number in (1, 2)]
    results = worker.get_finished()
    assert [(result.job_id, result.success, result.transfer_size) for result in results] == [
        (1, True, 100),
        (2, True, 100),
    ]
    assert all(result.transfer_time > 0 for result in results)


def test_a_layer_waits_for_itself_only(stepped: Stepped) -> None:
    copies, worker = stepped
    loads = worker.load_by_layer(jobs(1))
    copies.go(1)
    loads.wait(0)
    copies.wait_for_calls(2)  # layer 1 is under way
    through = threading.Event()
    waiter = threading.Thread(target=lambda: (loads.wait(1), through.set()))
    waiter.start()
    assert not through.wait(0.05)
    copies.go(1)
    waiter.join(10)
    assert through.is_set()
    loads.wait(7)  # nothing is loaded into it
    assert worker.get_finished() == []
    copies.go()
    loads.wait()
    worker.wait({1})
    assert len(worker.get_finished()) == 1


@pytest.mark.parametrize("under_way", ["store", "load"])
def test_a_copy_makes_way_before_its_next_layer_and_stores_wait_for_loads(stepped: Stepped, under_way: str) -> None:
    copies, worker = stepped
    submit = {"store": lambda: worker.submit_store(7, device([7]), host([7]))}
    submit["load"] = lambda: worker.submit_load(7, host([7]), device([7]))
    submit[under_way]()
    copies.wait_for_calls()
    for job in (8, 10):
        worker.submit_store(job, device([job]), host([job]))
    worker.submit_load(9, host([9]), device([9]))
    worker.load_by_layer(jobs(1))
    copies.go()
    worker.wait({1, 7, 8, 9, 10})
    expected = [(under_way, 0, [7])]
    expected += [("load", layer, [1]) for layer in range(LAYERS)]
    expected += [(under_way, layer, [7]) for layer in range(1, LAYERS)]
    expected += [("load", layer, [9]) for layer in range(LAYERS)]
    expected += [("store", layer, [job]) for job in (8, 10) for layer in range(LAYERS)]
    assert copies.calls == expected


def test_a_load_that_fails_leaves_the_others_alone(stepped: Stepped) -> None:
    copies, worker = stepped
    copies.fails = {(1, 2)}
    copies.go()
    loads = worker.load_by_layer({**jobs(1, 2), 3: TransferJob("r3", host([3, 4]), device([3]))})
    loads.wait()
    worker.wait({1, 2, 3})
    assert copies.calls == [("load", 0, [1]), ("load", 0, [2]), ("load", 1, [1]), ("load", 1, [2]), ("load", 2, [1])]
    assert {result.job_id for result in worker.get_finished()} == {1, 2, 3}
    report = worker.take_report()
    assert (report.chunks, report.blocks, report.load_jobs) == ({2, 3, 4}, {2, 3}, {2, 3})


@pytest.mark.parametrize("bits", [LOSSLESS, QUANTISED])
def test_layer_by_layer_brings_what_a_load_between_steps_brings(bits: int) -> None:
    kv = random_kv(num_tensors=LAYERS)
    worker = TierWorker(codec(bits, kv), [range(LAYERS)], chunk_bytes=LAYERS * LAYOUT.page_bytes)
    worker.submit_store(1, device([3, 5]), host([4, 2]))
    worker.wait({1})
    worker.submit_load(2, host([4, 2]), device([0, 1]))
    worker.wait({2})
    more = TransferJob("r3", host([4, 2]), device([8, 9])), TransferJob("r4", host([2]), device([11], index=1))
    worker.load_by_layer(dict(enumerate(more, start=3)))
    worker.wait({3, 4})
    assert not worker.take_report().chunks
    for tensor in kv:
        assert tensor[8].equal(tensor[0])
        assert tensor[9].equal(tensor[1])
        assert tensor[11].equal(tensor[1])
    worker.shutdown()


# --- the connector's worker -----------------------------------------------------------------------------------------


class Side(LayerwiseWorker):
    """Without a model; three layers, each with a tensor of its own."""

    def __init__(self, worker: Any) -> None:
        super().__init__(SimpleNamespace(replicated_layout=False), SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
        self.worker = worker
        self._tensor_of = {f"layer.{layer}": layer for layer in range(LAYERS)}

    def forward(self, layers: range = range(LAYERS)) -> None:
        """What attention asks."""
        for layer in layers:
            self.wait_for_layer(f"layer.{layer}")


def metadata(in_step: set[int], between: set[int] = frozenset()) -> TierMetadata:  # type: ignore[assignment]
    return TierMetadata(load_jobs=jobs(*sorted(in_step | between)), store_jobs={}, in_step=frozenset(in_step))


def test_loads_of_the_step_are_reported_with_it_and_to_no_request(stepped: Stepped) -> None:
    copies, worker = stepped
    copies.go()
    side = Side(worker)
    side.start_kv_transfers(metadata({1, 2}))
    side.forward()
    assert side.get_finished(set()) == (set(), set())
    meta = side.build_connector_worker_meta()
    assert meta is not None
    assert meta.completed_jobs == {1: 1, 2: 1}
    assert meta.transfer_stats.load.bytes == 200
    assert side.take_doubtful() == set()


def test_loads_between_steps_begin_when_the_forward_is_through(stepped: Stepped) -> None:
    copies, worker = stepped
    copies.go()
    side = Side(worker)
    side.start_kv_transfers(metadata({1}, between={5}))
    side.forward()
    worker.wait({5})
    assert [chunks for _, _, chunks in copies.calls] == [[1]] * LAYERS
    received = side.get_finished(set())[1]
    worker.wait({5})
    received |= side.get_finished(set())[1]
    assert received == {"r5"}
    assert [chunks for _, _, chunks in copies.calls] == [[1]] * LAYERS + [[5]] * LAYERS


def test_a_step_without_loads_of_its_own_waits_for_nothing(stepped: Stepped) -> None:
    copies, worker = stepped
    side = Side(worker)
    side.start_kv_transfers(OffloadingConnectorMetadata(load_jobs=metadata({5}).load_jobs, store_jobs={}))
    side.forward()
    assert side.get_finished(set()) == (set(), set())
    copies.go()
    worker.wait({5})
    assert side.get_finished(set()) == (set(), {"r5"})


def test_layers_that_did_not_wait_make_the_loads_doubtful_and_later_ones_wait_before_the_forward(
    stepped: Stepped,
) -> None:
    copies, worker = stepped
    copies.go()
    side = Side(worker)
    side.start_kv_transfers(metadata({1, 2}))
    side.forward(range(1, LAYERS))
    side.get_finished(set())
    assert side.take_doubtful() == {1, 2}
    assert side.take_doubtful() == set()
    assert not side.trusts_attention
    side.start_kv_transfers(metadata({3}))
    assert len(copies.calls) == 3 * LAYERS, "all of it is there"
    side.get_finished(set())
    assert side.take_doubtful() == set()


def test_without_a_tensor_for_each_layer_the_first_one_waits_for_all(stepped: Stepped) -> None:
    copies, worker = stepped
    side = Side(worker)
    side._tensor_of = {}
    side.start_kv_transfers(metadata({1}))
    copies.go()
    side.wait_for_layer("layer.0")
    assert len(copies.calls) == LAYERS
    side.get_finished(set())
    assert side.take_doubtful() == set()


def test_a_worker_that_knows_no_layers_is_waited_for_before_the_forward() -> None:
    class Plain:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            self.calls.append(job_id)
            return True

        def wait(self, job_ids: set[int]) -> None:
            self.calls.append(set(job_ids))

    worker = Plain()
    side = Side(worker)
    side.start_kv_transfers(metadata({1, 2}))
    assert worker.calls == [1, 2, {1, 2}]
    side.forward()


# --- the rest -------------------------------------------------------------------------------------------------------


def test_which_loads_are_of_the_step_is_told_to_other_processes() -> None:
    sent = copy.deepcopy(metadata({1}, between={2}))  # by the protocol of pickling, which vLLM uses between processes
    assert isinstance(sent, OffloadingConnectorMetadata)
    assert sent.in_step == {1}
    assert set(sent.load_jobs) == {1, 2}


@pytest.mark.parametrize(("load", "piecewise"), [("between", False), ("in-step", True), ("auto", True)])
def test_graphs_of_whole_steps_are_given_up_where_layers_wait(load: str, piecewise: bool) -> None:
    extra = transfer_config(KvTierConfig(gib=1, load=load)).kv_connector_extra_config
    assert TieredConnector.requires_piecewise_for_cudagraph(extra) is piecewise


# --- what a load costs whom, by hand -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load_s", "step_s", "num_layers", "expected"),
    [
        (0.4, 4.0, 4, 0.1),  # hidden, but for the first layer's quarter
        (4.0, 4.0, 4, 1.0),  # layers keep pace: the last one's quarter is there after 4 s, and computes for 1 s
        (8.0, 4.0, 4, 5.0),  # the link sets the pace: 8 s, then the last layer's 1 s, less the step's own 4 s
        (2.0, 4.0, 1, 2.0),  # one layer hides nothing
        (0.0, 4.0, 4, 0.0),
    ],
)
def test_what_a_step_does_not_hide_of_a_load(load_s: float, step_s: float, num_layers: int, expected: float) -> None:
    assert exposed_s(load_s, step_s, num_layers) == pytest.approx(expected)


def test_between_steps_a_request_waits_for_whole_steps_or_where_nothing_runs_for_the_load_only() -> None:
    assert between_s(0.1, 1.0, others=3) == 2.0
    assert between_s(2.5, 1.0, others=3) == 4.0
    assert between_s(2.5, 1.0, others=0) == 2.5


def choose(load_s: float, others: int, planned_s: float = 0.0, num_layers: int = 10, behind_s: float = 0.0) -> bool:
    return in_step_is_cheaper(
        load_s, planned_s=planned_s, step_s=1.0, num_layers=num_layers, others=others, behind_s=behind_s
    )


@pytest.mark.parametrize("load_s", [0.001, 1.0, 50.0])
def test_alone_a_request_loads_within_the_step(load_s: float) -> None:
    assert choose(load_s, others=0)


def test_many_do_not_wait_long_for_one() -> None:
    """1 s of load makes the step 0.1 s longer, for all; between steps the request alone waits for 2 s."""
    assert choose(1.0, others=18)  # 19 * 0.1 < 2
    assert not choose(1.0, others=20)  # 21 * 0.1 > 2


def test_what_the_step_loads_already_counts() -> None:
    """Behind 2 s of loads, which make the step 1.1 s longer, another second costs each of the others all of it."""
    assert choose(1.0, others=1)
    assert choose(1.0, others=1, planned_s=2.0)  # 2.1 + 1 < 1 + 3
    assert not choose(1.0, others=2, planned_s=2.0)  # 2.1 + 2 > 1 + 3


def test_with_one_layer_loads_are_between_steps_as_soon_as_somebody_waits_long_enough() -> None:
    assert choose(0.5, others=3, num_layers=1)  # 4 * 0.5 = 2
    assert not choose(0.5, others=4, num_layers=1)


def test_behind_loads_that_nobody_waits_for_a_step_would_wait_for_them_too() -> None:
    assert exposed_s(0.4, 4.0, 4, behind_s=3.0) == pytest.approx(3.1)
    assert exposed_s(0.0, 4.0, 4, behind_s=3.0) == 0.0, "a step that loads nothing"
    assert between_s(0.5, 1.0, others=3, behind_s=0.9) == 2.0, "by the end of the step at hand the link is free"
    assert between_s(0.5, 1.0, others=3, behind_s=2.5) == 3.0
    assert between_s(2.5, 1.0, others=0, behind_s=1.5) == 4.0
    assert choose(1.0, others=18)
    assert not choose(1.0, others=18, behind_s=0.5)
