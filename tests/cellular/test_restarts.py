"""What goes wrong beside the cells' own computation: whose fault it is, and that the others are served on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.cellular.plain import Plain
from tests.cellular.test_engine import die, held, nothing_is_left
from tests.cellular.test_own_models import Counter
from tests.cellular.test_serving import server
from tests.support.extent import HANG_S
from vllm_ext.cellular import engine as engines
from vllm_ext.cellular.engine import CellularEngine
from vllm_ext.cellular.models import build
from vllm_ext.cellular.requests import EngineError

BAD = 13


def label_of(engine: CellularEngine, tokens: list[int]) -> Any:
    return engine.submit({"tokens": tokens}).result(HANG_S)["label"]


def raising(inner: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if when(*args):
            raise ArithmeticError("seen")
        return inner(*args)

    return call


def test_a_worker_that_dies_begins_anew_and_serves_who_was_not_in_its_tasks() -> None:
    model = build("lstm")
    with held(model, max_batch={"step": 1}, max_tasks_to_submit=1) as (engine, compute):
        compute.fail = die  # type: ignore[assignment]
        lost, kept = engine.submit({"tokens": [BAD, 2]}), engine.submit({"tokens": [1, 2, 3]})
        compute.go.set()
        with pytest.raises(EngineError, match="worker 0 died with SystemExit"):
            lost.result(HANG_S)
        assert kept.result(HANG_S)["label"] == int(Plain(model).scores({"tokens": [1, 2, 3]}).argmax())
        assert (engine.healthy, engine.restarts, engine.dead_workers, engine.errors) == (True, 1, 0, 1)
        nothing_is_left(engine)


def test_a_worker_that_dies_more_often_in_a_minute_than_allowed_stays_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_MINUTE_S", HANG_S)
    with held(max_restarts=2) as (engine, compute):
        compute.fail = die  # type: ignore[assignment]
        compute.go.set()
        for restarts in (1, 2, 2):
            with pytest.raises(EngineError, match="died"):
                engine.submit({"tokens": [BAD]}).result(HANG_S)
            assert engine.restarts == restarts
        engine._threads[0].join(HANG_S)
        assert (engine.healthy, engine.dead_workers) == (False, 1)


def test_deaths_of_more_than_a_minute_ago_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_MINUTE_S", -1.0)
    with held(max_restarts=1) as (engine, compute):
        compute.fail = die  # type: ignore[assignment]
        compute.go.set()
        for _ in range(4):
            with pytest.raises(EngineError, match="died"):
                engine.submit({"tokens": [BAD]}).result(HANG_S)
        assert label_of(engine, [1]) is not None
        assert engine.restarts == 4


@pytest.mark.parametrize("method", ["complete", "schedule"])
def test_requests_of_a_task_are_answered_when_the_scheduler_raises(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held() as (engine, compute):
        inner = getattr(engine.batching, method)
        failed: list[int] = []

        def once(*args: Any) -> Any:
            result = inner(*args)
            if result and not failed:
                failed.append(1)
                raise ArithmeticError("seen")
            return result

        monkeypatch.setattr(engine.batching, method, once)
        handle = engine.submit({"tokens": [1, 2, 3]})
        compute.go.set()
        with pytest.raises(EngineError, match="died with ArithmeticError"):
            handle.result(HANG_S)
        assert label_of(engine, [1]) is not None
        assert engine.open_requests == 0


def test_requests_that_cannot_begin_give_back_what_they_took_and_their_session_goes_on() -> None:
    with held(Counter()) as (engine, compute):
        compute.go.set()
        engine.batching.add = raising(engine.batching.add, lambda *_: not engine.restarts)  # type: ignore[method-assign]
        session = engine.open_session()
        with pytest.raises(EngineError, match="the request cannot begin: ArithmeticError"):
            session.submit({"xs": [1]}).result(HANG_S)
        assert session.submit({"xs": [1]}).result(HANG_S) == {"sum": [1.0]}
        session.close()
        nothing_is_left(engine)


def test_a_metric_that_raises_keeps_no_answer_back() -> None:
    with held() as (engine, compute):
        engine.on_finished = raising(lambda _: None, lambda _: True)
        compute.go.set()
        assert label_of(engine, [1, 2]) is not None
        assert (engine.restarts, engine.healthy) == (0, True)


def test_data_that_cannot_be_stored_fails_its_request_alone() -> None:
    with held() as (engine, compute):
        first = engine.submit({"tokens": [1] * 9})
        assert compute.reached.wait(HANG_S)
        handles = [engine.submit({"tokens": [1, 2]}) for _ in range(3)]
        (kind, row, values), *_ = handles[1].graph.inputs
        object.__setattr__(handles[1].graph, "inputs", ((kind, row, values[:, None]),))
        compute.go.set()
        with pytest.raises(EngineError, match="data cannot be stored"):
            handles[1].result(HANG_S)
        assert all("label" in one.result(HANG_S) for one in (first, handles[0], handles[2]))
        assert engine.restarts == 0
        nothing_is_left(engine)


def test_results_that_cannot_be_read_fail_their_request_alone() -> None:
    with held() as (engine, compute):
        engine.submit({"tokens": [1] * 9})
        assert compute.reached.wait(HANG_S)
        handles = [engine.submit({"tokens": [1, 2]}) for _ in range(3)]
        object.__setattr__(handles[1].graph, "results", {"scores": None})
        compute.go.set()
        with pytest.raises(EngineError, match="results cannot be read"):
            handles[1].result(HANG_S)
        assert all("label" in one.result(HANG_S) for one in (handles[0], handles[2]))
        assert (engine.restarts, engine.errors) == (0, 1)


def test_a_session_goes_on_after_its_worker_died() -> None:
    with held(Counter()) as (engine, compute):
        compute.fail = lambda cell, inputs: die(cell, [inputs[0].long()])
        compute.go.set()
        session = engine.open_session()
        assert session.submit({"xs": [1, 2]}).result(HANG_S) == {"sum": [3.0]}
        with pytest.raises(EngineError, match="died"):
            session.submit({"xs": [BAD]}).result(HANG_S)
        assert session.submit({"xs": [4]}).result(HANG_S) == {"sum": [7.0]}
        session.close()
        nothing_is_left(engine)


async def test_health_and_metrics_tell_of_workers_that_died() -> None:
    async with server(build("lstm"), workers=2, max_restarts=1) as (client, _, compute):
        compute.fail = die  # type: ignore[assignment]
        for restarts, dead in ((1, 0), (1, 1)):
            assert (await client.post("/v1/infer", json={"tokens": [BAD]})).status_code == 500
            health = await client.get("/health")
            assert (health.status_code, health.json()) == (200, {"workers": 2, "dead": dead, "restarts": restarts})
            text = (await client.get("/metrics")).text
            assert f'vllm_ext:cell_workers{{state="dead"}} {dead}.0' in text
            assert f"vllm_ext:cell_worker_restarts_total {restarts}.0" in text
