"""Padded and merged batching: by hand, and equal answers in the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.cellular.graphs_of import cells, chain, compiled, complete_tree, translation, tree
from tests.cellular.plain import Plain, listening, lively, random_tree
from tests.cellular.test_engine import sentences
from tests.support.extent import HANG_S
from vllm_ext.cellular.engine import CellularEngine
from vllm_ext.cellular.graphs import CellGraph, CellTable
from vllm_ext.cellular.models import build
from vllm_ext.cellular.scheduler import Batching
from vllm_ext.experiments.batching.merging import MergedBatching, Merging
from vllm_ext.experiments.batching.padding import PaddedBatching
from vllm_ext.experiments.batching.virtual import Arrival, Costs, Served, StepCost, serve

UNIT = Costs(cells=dict.fromkeys(("step", "decoder", "leaf", "internal"), lambda _: 1.0))
SERIAL = Merging(name="serial", node_s=0.25, overlapped=False)
OVERLAPPED = Merging(name="overlapped", node_s=0.25, overlapped=True)


def arrivals(graphs: list[CellGraph], table: CellTable, lengths: dict[int, int] | None = None) -> list[Arrival]:
    return [Arrival(at_s=0.1 * n, graph=compiled(g, table), lengths=lengths or {}) for n, g in enumerate(graphs)]


def padded(
    graphs: list[CellGraph], *, max_batch: int = 4, width: int = 10, lengths: dict[int, int] | None = None
) -> Served:
    table = cells()
    return serve(PaddedBatching(table, max_batch=max_batch, width=width), arrivals(graphs, table, lengths), UNIT)


def test_a_batch_takes_as_long_as_its_bucket_and_starts_without_waiting_for_more() -> None:
    served = padded([chain(2), chain(3), chain(12)], width=5)
    assert served.started_s.tolist() == [0, 20, 5]
    assert served.ended_s.tolist() == [5, 25, 20]


def test_buckets_are_served_in_turn() -> None:
    served = padded([chain(1), chain(1), chain(6), chain(2)], width=5, max_batch=1)
    assert served.started_s.tolist() == [0, 15, 5, 20]


def test_a_turn_serves_all_who_wait_when_it_comes() -> None:
    served = padded([chain(9), chain(1), chain(2), chain(8), chain(1)], width=5, max_batch=1)
    assert served.started_s.tolist() == [0, 10, 15, 25, 20]


def test_a_batch_decodes_until_its_longest_has_ended() -> None:
    table = cells()
    made = [compiled(translation(2, 9), table) for _ in range(3)]
    requests = [Arrival(at_s=0.0, graph=g, lengths={1: n}) for g, n in zip(made, (4, 2, 7), strict=True)]
    served = serve(PaddedBatching(table, width=2), requests, UNIT)
    assert served.ended_s.tolist() == [9, 9, 9]
    assert (served.rows, served.useful_rows) == (3 * 9, 3 * 2 + 4 + 2 + 7)


def test_who_comes_during_a_batch_waits_and_merging_takes_its_time() -> None:
    """Three nodes are merged in 0.75 s and computed in two levels."""
    table = cells()
    batching = MergedBatching(table, merging=SERIAL, max_requests=1)
    served = serve(batching, arrivals([tree((0, 1)), tree((0, 1))], table), UNIT)
    assert served.ended_s.tolist() == pytest.approx([2.75, 5.5])


def test_merging_of_the_next_batch_is_hidden_behind_this_one() -> None:
    table = cells()
    made = arrivals([tree(complete_tree(8))] * 4, table)
    slow, fast = (
        serve(MergedBatching(table, merging=m, max_requests=1), made, UNIT).ended_s for m in (SERIAL, OVERLAPPED)
    )
    merged_s, computed_s = 15 * 0.25, 4.0
    assert slow[-1] == pytest.approx(4 * (merged_s + computed_s))
    assert fast[-1] < slow[-1] - merged_s


def test_costs_are_flat_and_then_linear() -> None:
    cost = StepCost(flat_s=1.0, knee=64, full_s=4.0, full=512)
    assert [cost(rows) for rows in (1, 64, 288, 512)] == [1.0, 1.0, 2.5, 4.0]
    assert cost.scaled(2.0)(512) == 8.0
    with pytest.raises(ValueError, match="knee=512"):
        StepCost(flat_s=1.0, knee=512, full_s=2.0, full=512)


def padding(table: CellTable, freed: Callable[[int], None]) -> Batching:
    return PaddedBatching(table, freed, max_batch=16, width=7)


def padding_of_chunks(table: CellTable, freed: Callable[[int], None]) -> Batching:
    return PaddedBatching(table, freed, max_batch=16, width=1)


def merging(table: CellTable, freed: Callable[[int], None]) -> Batching:
    return MergedBatching(table, freed, merging=Merging(name="free", node_s=0.0, overlapped=False))


@pytest.mark.parametrize("batching", [padding, merging])
def test_every_manner_of_batching_gives_the_same_answers(batching: Any) -> None:
    """A benchmark once compared streams of padded batches that said something else."""
    model = lively(build("seq2seq", seed=3, vocabulary=8))
    plain = Plain(model, torch.float32)
    tokens = [[token % 8 for token in one] for one in sentences(30)]
    with CellularEngine(model, batching=batching) as engine:
        handles = [engine.submit({"tokens": one, "max_steps": 9}) for one in tokens]
        assert [h.result(HANG_S)["tokens"] for h in handles] == [plain.translate(one, 9) for one in tokens]


def test_padding_is_computed_and_neither_fails_nor_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    """Rows that padding had written to were once its next inputs: no valid token, so that whole batches fell apart."""
    model = build("seq2seq", hidden=8, vocabulary=4, forced=1)
    tokens = [[1] * length for length in range(1, 40)]
    with CellularEngine(model, batching=padding) as engine:
        handles = [engine.submit({"tokens": one, "length": 3 * len(one), "max_steps": 200}) for one in tokens]
        assert [len(handle.result(HANG_S)["tokens"]) for handle in handles] == [3 * len(one) for one in tokens]
        assert engine.arena.traffic.reused > engine.arena.traffic.gathered, "a batch goes on without copies"
        assert all(not rows[0].any() for rows in engine.arena._rows)
    assert "one by one" not in caplog.text


def test_padded_streams_say_what_single_ones_do() -> None:
    model = listening()
    audio = np.random.default_rng(0).normal(size=(5, 9, 4, 128)).astype(np.float32)
    with CellularEngine(model, batching=padding_of_chunks) as engine:
        sessions = [engine.open_session() for _ in audio]
        handles = [[s.submit({"audio": c.tolist()}) for c in one] for s, one in zip(sessions, audio, strict=True)]
        found = [[handle.result(HANG_S)["tokens"] for handle in one] for one in handles]
    assert found == [Plain(model, torch.float32).transcribe(one) for one in audio]


def test_merged_trees_score_as_single_ones() -> None:
    model = build("treelstm")
    rng = np.random.default_rng(4)
    trees = [{"tree": random_tree(rng, 4)} for _ in range(20)]
    with CellularEngine(model, batching=merging) as engine:
        handles = [engine.submit(request) for request in trees]
        labels = [handle.result(HANG_S)["label"] for handle in handles]
        assert engine.open_requests == 0
    assert labels == [int(Plain(model).scores(request).argmax()) for request in trees]
