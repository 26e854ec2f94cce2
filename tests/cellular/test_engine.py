"""The engine's answers are those of each request alone; and what becomes of requests when things go wrong."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.cellular.plain import Plain, listening, lively, random_tree
from tests.support.extent import HANG_S
from vllm_ext.cellular.arena import Arena, ArenaFull
from vllm_ext.cellular.cells import Cell, Kind
from vllm_ext.cellular.engine import CellularEngine, _resized
from vllm_ext.cellular.garbage import freeze
from vllm_ext.cellular.graphs import CellGraph, Output
from vllm_ext.cellular.layout import Region
from vllm_ext.cellular.models import Model, Parsed, RequestError, build
from vllm_ext.cellular.models.lstm import Lstm
from vllm_ext.cellular.models.seq2seq import EOS, Seq2Seq
from vllm_ext.cellular.options import EngineOptions
from vllm_ext.cellular.requests import EngineBusy, EngineError, Request
from vllm_ext.cellular.scheduler import Scheduler

LENGTHS = 40


def sentences(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 32, rng.integers(1, LENGTHS)).tolist() for _ in range(count)]


def requests_of(kind: str, count: int) -> list[dict[str, Any]]:
    if kind == "lstm":
        return [{"tokens": tokens} for tokens in sentences(count)]
    rng = np.random.default_rng(1)
    return [{"tree": random_tree(rng, 5)} for _ in range(count)]


def nothing_is_left(engine: CellularEngine) -> None:
    """All rows and numbers have come back."""
    assert engine.open_requests == 0
    assert [ranges.taken for ranges in engine.arena._ranges] == [0] * len(engine.cells.kinds)
    assert not any(map(len, engine.batching.queues))  # type: ignore[attr-defined]
    assert not engine._stored


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("order", ["arrival", "slack"])
@pytest.mark.parametrize("kind", ["lstm", "treelstm"])
def test_scores_are_those_of_plain_torch(kind: str, order: str, workers: int) -> None:
    """The allowed error is what plain fp32 is off from fp64 at most, over all requests, 8 times."""
    model = build(kind)
    exact, single = Plain(model), Plain(model, torch.float32)
    requests = requests_of(kind, 40)
    want = [exact.scores(request) for request in requests]
    allowed = 8 * max(float((single.scores(r) - w).abs().max()) for r, w in zip(requests, want, strict=True))
    with CellularEngine(model, EngineOptions(order=order, workers=workers)) as engine:
        handles = [engine.submit(request, slo_s=0.05 * (place % 3 + 1)) for place, request in enumerate(requests)]
        found = [handle.result(HANG_S) for handle in handles]
        nothing_is_left(engine)
    worst = max(float((torch.tensor(f["scores"]) - w).abs().max()) for f, w in zip(found, want, strict=True))
    assert worst <= allowed
    assert [one["label"] for one in found] == [int(scores.argmax()) for scores in want]


@pytest.mark.parametrize("workers", [1, 2])
def test_decoders_end_by_themselves_or_at_their_bound_and_stream_what_they_return(workers: int) -> None:
    model = lively(build("seq2seq", seed=3, vocabulary=8))
    plain = Plain(model, torch.float32)
    tokens = [[token % 8 for token in one] for one in sentences(60)]
    want = [plain.translate(one, 12) for one in tokens]
    assert {len(one) for one in want} > {12}, "some end by themselves, some are cut"
    streamed: list[list[int]] = [[] for _ in tokens]
    with CellularEngine(model, EngineOptions(workers=workers)) as engine:
        handles = [
            engine.submit({"tokens": one, "max_steps": 12}, on_output=into.append)
            for one, into in zip(tokens, streamed, strict=True)
        ]
        found = [handle.result(HANG_S) for handle in handles]
        assert [one["tokens"] for one in found] == want == streamed
        assert {len(one["tokens"]) for one in found if one["finish_reason"] == "length"} == {12}
        assert all(one["tokens"][-1] == EOS for one in found if one["finish_reason"] == "stop")
        nothing_is_left(engine)


class LastState(Seq2Seq):
    """Returns the state in which a decoder ended, too."""

    def unfold(self, parsed: Parsed) -> CellGraph:
        graph = super().unfold(parsed)
        graph.result["h"] = Output(len(graph.nodes) - 1, "h")
        return graph

    def answer(self, values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return {**super().answer(values), "h": values["h"].tolist()}


def test_a_series_computed_before_it_is_read_says_the_same_and_writes_no_more() -> None:
    """As on a CUDA device: nodes that have ended are computed again before anybody knows."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = LastState({"vocabulary": 8})
    for module in model.modules.values():
        module.requires_grad_(False)
    lively(model)
    tokens = [[token % 8 for token in one] for one in sentences(30)]
    found = []
    for ahead in (False, True):
        streamed: list[list[int]] = [[] for _ in tokens]
        with CellularEngine(model) as engine:
            engine._ahead = ahead
            handles = [
                engine.submit({"tokens": one, "max_steps": 12}, on_output=into.append)
                for one, into in zip(tokens, streamed, strict=True)
            ]
            found.append([handle.result(HANG_S) for handle in handles])
            nothing_is_left(engine)
        assert [one["tokens"] for one in found[-1]] == streamed
    assert {one["finish_reason"] for one in found[0]} == {"stop", "length"}
    for one, other in zip(*found, strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["h"] == pytest.approx(other["h"], rel=1e-4, abs=1e-6)


def test_sessions_of_series_computed_before_they_are_read_keep_the_state_of_their_last_step() -> None:
    model = listening()
    audio = np.random.default_rng(0).normal(size=(6, 12, 4, 128)).astype(np.float32)
    with CellularEngine(model) as engine:
        engine._ahead = True
        sessions = [engine.open_session() for _ in audio]
        handles = [[s.submit({"audio": c.tolist()}) for c in one] for s, one in zip(sessions, audio, strict=True)]
        found = [[handle.result(HANG_S)["tokens"] for handle in one] for one in handles]
    assert found == [Plain(model, torch.float32).transcribe(one) for one in audio]


def test_a_graph_that_never_ends_is_cut_at_its_bound() -> None:
    model = build("seq2seq", vocabulary=8, forced=1)
    with CellularEngine(model) as engine:
        ends = engine.submit({"tokens": [1, 2], "max_steps": 9, "length": 8})
        assert len(ends.result(HANG_S)["tokens"]) == 8
        model.modules["decoder"].forward = endless(model.modules["decoder"].forward)
        never = engine.submit({"tokens": [1, 2], "max_steps": 9, "length": 9})
        assert len(never.result(HANG_S)["tokens"]) == 9
        nothing_is_left(engine)


def endless(forward: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., tuple[torch.Tensor, ...]]:
    def never_done(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *outputs, done = forward(*inputs)
        return (*outputs, torch.zeros_like(done))

    return never_done


def test_a_client_whose_callback_raises_still_gets_its_answer() -> None:
    def raises(value: int) -> None:
        raise OSError(value)

    with CellularEngine(build("seq2seq")) as engine:
        handle = engine.submit({"tokens": [1, 2], "max_steps": 3}, on_output=raises)
        assert handle.result(HANG_S)["tokens"]
        assert engine.healthy


def test_sessions_keep_their_state_apart_and_give_it_back() -> None:
    model = listening()
    audio = np.random.default_rng(0).normal(size=(6, 12, 4, 128)).astype(np.float32)
    with CellularEngine(model) as engine:
        sessions = [engine.open_session() for _ in audio]
        handles = [[s.submit({"audio": c.tolist()}) for c in one] for s, one in zip(sessions, audio, strict=True)]
        found = [[handle.result(HANG_S)["tokens"] for handle in one] for one in handles]
        for session in sessions:
            session.close()
            session.close()
        nothing_is_left(engine)
        with pytest.raises(EngineError, match="the session is closed"):
            sessions[0].submit({"audio": [[0.0] * 128] * 4})
        with pytest.raises(RequestError, match="session=None: must be given"):
            engine.submit({"audio": [[0.0] * 128] * 4})
    assert found == [Plain(model, torch.float32).transcribe(one) for one in audio]
    assert any(any(one) for one in found[0])


class Held:
    """Calls cells, the first time only when it is let."""

    def __init__(self) -> None:
        self.go, self.reached = threading.Event(), threading.Event()
        self.fail: Callable[[Cell, list[torch.Tensor]], None] = lambda *_: None

    def __call__(self, cell: Cell, inputs: Any) -> tuple[torch.Tensor, ...]:
        self.reached.set()
        assert self.go.wait(HANG_S)
        self.fail(cell, inputs)
        return cell.call(inputs)


@contextmanager
def held(model: Model | None = None, **options: Any) -> Iterator[tuple[CellularEngine, Held]]:
    compute = Held()
    with CellularEngine(model or build("lstm"), EngineOptions(**options), compute=compute) as engine:
        try:
            yield engine, compute
        finally:
            compute.go.set()


@pytest.mark.parametrize("aborted", [False, True])
def test_a_chunk_that_ends_half_way_leaves_its_session_as_it_was(aborted: bool) -> None:
    """The encoder has gone on and symbols were emitted when the decoder is stopped."""
    model = listening()
    first, bad, *rest = np.random.default_rng(0).normal(size=(12, 4, 128)).astype(np.float32)
    want = Plain(model, torch.float32).transcribe(np.array([first, *rest]))
    stopping, reached, go = threading.Event(), threading.Event(), threading.Event()

    def stop(cell: Cell, inputs: list[torch.Tensor]) -> None:
        if stopping.is_set() and cell.name == "decoder" and inputs[1].any():
            reached.set()
            assert go.wait(HANG_S)
            if not aborted:
                raise ArithmeticError("injected")

    with held(model) as (engine, compute):
        compute.fail = stop
        compute.go.set()
        session = engine.open_session()
        found = [session.submit({"audio": first}).result(HANG_S)["tokens"]]
        stopping.set()
        handle = session.submit({"audio": bad})
        assert reached.wait(HANG_S)
        if aborted:
            engine.abort(handle)
        go.set()
        with pytest.raises((EngineError, CancelledError)):
            handle.result(HANG_S)
        stopping.clear()
        found += [session.submit({"audio": one}).result(HANG_S)["tokens"] for one in rest]
    assert found == want


def test_a_session_has_its_state_back_when_a_worker_dies() -> None:
    def stop(cell: Cell, _: list[torch.Tensor]) -> None:
        if stopping and cell.name == "decoder":
            raise SystemExit

    def state() -> torch.Tensor:
        return engine.arena.gather(engine.cells.kind_number[Kind("float32", (64,))], rows)

    stopping = False
    model = build("rnnt")
    with held(model, workers=2) as (engine, compute):
        compute.fail = stop
        compute.go.set()
        session = engine.open_session()
        rows = np.array([row for name, row in session.rows.items() if name != "last"])
        session.submit({"audio": [[1.0] * 128] * 4}).result(HANG_S)
        before, stopping = state(), True
        assert before.any()
        with pytest.raises(EngineError):
            session.submit({"audio": [[2.0] * 128] * 4}).result(HANG_S)
        assert torch.equal(state(), before)


def test_an_aborted_request_leaves_and_the_others_stay_right() -> None:
    model = build("lstm")
    with held(model) as (engine, compute):
        requests = requests_of("lstm", 6)
        first = engine.submit(requests[0])
        assert compute.reached.wait(HANG_S)
        handles = [first, *(engine.submit(request) for request in requests[1:])]
        for handle in (handles[0], handles[3], handles[3]):
            engine.abort(handle)
        compute.go.set()
        for place, handle in enumerate(handles):
            if place in (0, 3):
                with pytest.raises(CancelledError):
                    handle.result(HANG_S)
            else:
                assert handle.result(HANG_S)["label"] == int(Plain(model).scores(requests[place]).argmax())
        engine.abort(handles[1])
        nothing_is_left(engine)


def test_too_many_requests_are_refused_with_a_time_to_come_back() -> None:
    with held(max_requests=2) as (engine, compute):
        kept = [engine.submit({"tokens": [1, 2]}) for _ in range(2)]
        with pytest.raises(EngineBusy, match="2 requests are open") as busy:
            engine.submit({"tokens": [1]})
        assert 1 <= busy.value.retry_after_s <= 60
        compute.go.set()
        assert all("label" in handle.result(HANG_S) for handle in kept)
        assert "label" in engine.submit({"tokens": [1]}).result(HANG_S)


def test_a_cell_that_raises_fails_only_whose_inputs_it_cannot_take() -> None:
    def fail(cell: Cell, inputs: list[torch.Tensor]) -> None:
        if cell.name == "step" and bool((inputs[0] == 13).any()):
            raise ArithmeticError("13")

    model = build("lstm")
    with held(model) as (engine, compute):
        compute.fail = fail
        requests = [{"tokens": tokens} for tokens in ([1, 2, 3], [4, 13, 5], [13], [6], [7, 8])]
        handles = [engine.submit(request) for request in requests]
        compute.go.set()
        for request, handle in zip(requests, handles, strict=True):
            if 13 in request["tokens"]:
                with pytest.raises(EngineError, match=r"cell step raised: ArithmeticError\('13'\)"):
                    handle.result(HANG_S)
            else:
                assert handle.result(HANG_S)["label"] == int(Plain(model).scores(request).argmax())
        assert engine.errors == 2
        nothing_is_left(engine)


def die(cell: Cell, inputs: list[torch.Tensor]) -> None:
    if bool((inputs[0] == 13).any()):
        raise SystemExit("a worker dies")


def test_the_other_worker_goes_on_when_one_dies_and_without_any_all_requests_fail() -> None:
    with held(workers=2, max_batch={"step": 1}, max_restarts=0) as (engine, compute):
        compute.fail = die  # type: ignore[assignment]
        compute.go.set()
        with pytest.raises(EngineError, match="died with SystemExit"):
            engine.submit({"tokens": [13]}).result(HANG_S)
        assert engine.healthy
        assert "label" in engine.submit({"tokens": [1, 2]}).result(HANG_S)
        with pytest.raises(EngineError, match="died"):
            engine.submit({"tokens": [13]}).result(HANG_S)
        for thread in engine._threads:
            thread.join(HANG_S)
        assert not engine.healthy
        with pytest.raises(EngineError, match="restart the engine"):
            engine.submit({"tokens": [1]})


@pytest.mark.parametrize(
    ("cells", "with_two", "with_one"),
    [(None, False, True), ("published", False, False), ("alternate", True, True)],
)
def test_cells_take_turns_when_fewer_than_two_workers_are_left(
    cells: str | None, with_two: bool, with_one: bool
) -> None:
    with held(workers=2, cells=cells, max_restarts=0) as (engine, compute):
        scheduler = engine.batching
        assert isinstance(scheduler, Scheduler)
        assert scheduler._alternates() is with_two
        compute.fail = die  # type: ignore[assignment]
        compute.go.set()
        with pytest.raises(EngineError, match="died"):
            engine.submit({"tokens": [13]}).result(HANG_S)
        assert scheduler._alternates() is with_one


def test_open_requests_fail_when_the_engine_closes() -> None:
    with held() as (engine, compute):
        handles: list[Request] = [engine.submit({"tokens": [1] * 30}) for _ in range(3)]
        assert compute.reached.wait(HANG_S)
        engine._closing = True
        compute.go.set()
    for handle in handles:
        assert handle.future.done()
    with pytest.raises(EngineError, match="closed"):
        engine.submit({"tokens": [1]})


def test_a_request_that_never_fits_fails_and_one_that_does_not_fit_yet_waits() -> None:
    model = build("seq2seq")
    with CellularEngine(model, EngineOptions(state_bytes=1_500_000)) as engine:
        ran = [engine.submit({"tokens": [1] * 2000, "max_steps": 5}) for _ in range(60)]
        assert all(len(handle.result(HANG_S)["tokens"]) <= 5 for handle in ran)
        nothing_is_left(engine)
    kinds = engine.cells.kinds
    arena = Arena(kinds, max_bytes=1_000_000)
    with pytest.raises(ArenaFull, match=r"rows of int64\[\]"):
        arena.take([Region(0, 500_000)])
    assert [ranges.taken for ranges in arena._ranges] == [0] * len(kinds)
    assert arena.take([Region(0, 2000)])[0] == 2


class Centred(torch.nn.Module):
    """A step whose state is made relative to the batch's."""

    def __init__(self, step: torch.nn.Module) -> None:
        super().__init__()
        self.step = step

    def forward(self, token: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
        return self.step(token, h - h.mean(0), c)


class Coupled(Lstm):
    @property
    def cells(self) -> tuple[Cell, ...]:
        step, *rest = super().cells
        return (replace(step, module=Centred(self.modules["step"])), *rest)


def test_a_cell_whose_rows_depend_on_each_other_is_refused() -> None:
    with pytest.raises(ValueError, match="output h of cell step: a row differs"):
        CellularEngine(Coupled({}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0}, "workers=0"),
        ({"workers": 2, "device": "cuda"}, "workers=2: must be 1"),
        ({"order": "lifo"}, "order='lifo'"),
        ({"max_restarts": -1}, "max_restarts=-1: must be greater than or equal to 0"),
        ({"cells": "any"}, "cells='any': must be one of published, alternate"),
        ({"max_batch": {"stop": 3}}, "max_batch="),
        ({"max_batch": {"step": 0}}, "max_batch=0 of cell step"),
    ],
)
def test_options_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CellularEngine(build("lstm"), EngineOptions(**options))


def test_batches_are_powers_of_two_and_smaller_on_a_cpu_unless_said_otherwise() -> None:
    powers = tuple(2**power for power in range(8))
    for said, want in ((None, powers), ({"encoder": 200}, (*powers, 200))):
        with CellularEngine(build("seq2seq"), EngineOptions(max_batch=said)) as engine:
            assert [cell.batch_sizes for cell in engine.cells.cells] == [want, powers]
    encoder = build("seq2seq").cells[0]
    assert _resized(encoder, {}, "cuda").batch_sizes == (*powers, 256, 512)


def test_a_server_that_is_ready_does_not_look_for_garbage_among_what_it_has() -> None:
    before = gc.get_freeze_count()
    freeze()
    try:
        assert gc.get_freeze_count() > before
        assert not gc.get_objects(generation=2)
    finally:
        gc.unfreeze()
