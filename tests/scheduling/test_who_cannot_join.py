"""However many requests could not join now, they keep nobody else out: stock vLLM is the yardstick."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request

from tests.support.loads import Loads
from tests.support.steering import Loras, Rig, unwatched
from vllm_ext.simulation.engine.harness import make_request

SYSTEMS = ("fcfs", "alise", "auto", "accelgen", "sarathi", "past-future", "fair+alise", "pensieve")


def _steps_until(rig: Rig, req_id: str, most: int) -> int | None:
    for number in range(most):
        decision = rig.loop.step()
        rig.clock.advance(0.02)
        if decision is not None and req_id in dict(decision.scheduled):
            return number + 1
    return None


@pytest.mark.parametrize("drafts", [0, 3, 5])
@pytest.mark.parametrize("system", [None, "fcfs", "alise", "auto", "accelgen", "sarathi"])
def test_a_proposer_that_finds_nothing_costs_no_tokens(system: str | None, drafts: int) -> None:
    rig = unwatched(system, num_blocks=2000, max_num_seqs=128, max_num_batched_tokens=256)

    def step() -> None:
        rig.loop.step()
        rig.clock.advance(0.02)
        running = [request.request_id for request in rig.scheduler.running]
        rig.scheduler.update_draft_token_ids(DraftTokenIds(running, [[] for _ in running]))

    for i in range(60):
        rig.add(f"r{i}", 3, length=390, osl=390)
    for _ in range(5):
        step()
    assert len(rig.running) == 60
    rig.scheduler.num_spec_tokens = drafts
    for i in range(40):
        rig.add(f"w{i}", 32, length=390, osl=100)
    for _ in range(8):  # 256 tokens a step, of which 60 to 100 decode
        step()
    assert len(rig.running) == 100


@pytest.mark.parametrize("system", [None, *SYSTEMS])
def test_an_adapter_without_a_place_keeps_no_base_request_out(system: str | None) -> None:
    rig = unwatched(system)
    rig.scheduler.lora_config = Loras(1)

    def add(name: str, adapter: int, osl: int) -> None:
        rig.lengths[name] = 300
        request = make_request(name, 16, max_tokens=400, arrival_time=rig.clock(), extra_args={"osl": osl})
        request.lora_request = LoRARequest(f"a{adapter}", adapter, "somewhere") if adapter else None
        rig.loop.add(request)

    add("one", 1, 300)
    rig.step()
    for i in range(300):
        add(f"two-{i}", 2, 5)
    add("base", 0, 50)
    assert _steps_until(rig, "base", 5) == 1
    assert rig.running == ["one", "base"]


@pytest.mark.parametrize("system", [None, *SYSTEMS])
def test_two_new_adapters_are_not_given_the_same_place(system: str | None) -> None:
    rig = unwatched(system)
    rig.scheduler.lora_config = Loras(1)
    for name, adapter in (("one", 1), ("two", 2), ("one-too", 1)):
        rig.lengths[name] = 30
        request = make_request(name, 16, max_tokens=400, arrival_time=rig.clock(), extra_args={"osl": 30})
        request.lora_request = LoRARequest(f"a{adapter}", adapter, "somewhere")
        rig.loop.add(request)
    rig.step()
    assert rig.running in (["one", "one-too"], ["one-too", "one"])
    rig.drain()
    assert rig.scheduler.requests == {}


@pytest.mark.parametrize("own", [True, False], ids=["tier", "connector"])
@pytest.mark.parametrize("count", [3, 8, 40])
@pytest.mark.parametrize("system", [None, *SYSTEMS])
def test_whom_a_connector_cannot_tell_about_yet_keeps_nobody_out(system: str | None, count: int, own: bool) -> None:
    """The other one starts in the first step, as with stock vLLM: whoever can't join is found out before the plan."""
    rig = unwatched(system)
    loads = _undecided(rig, system, count)
    if not own:
        rig.scheduler.prefixes.host = None
    rig.add("other", 16, length=100, osl=100)
    assert _steps_until(rig, "other", 60) == 1
    for name in loads.undecided:
        assert name in {request.request_id for request in rig.scheduler.waiting}


@pytest.mark.parametrize("system", ["alise", "auto", "accelgen", "past-future"])
def test_a_step_asks_a_connector_about_so_many_however_many_it_cannot_tell_about(system: str) -> None:
    rig = unwatched(system)
    loads = _undecided(rig, system, 300)
    asked: list[str] = []

    def can_tell(request: Request, _: int) -> bool:
        asked.append(request.request_id)
        return request.request_id not in loads.undecided

    loads.can_tell = can_tell  # type: ignore[method-assign]
    rig.add("other", 16, length=100, osl=100)
    rig.step(seconds=0.02)
    assert 0 < len(asked) <= 64 + 32
    assert _steps_until(rig, "other", 300 // 64 + 1) is not None
    assert len(set(asked)) == 301


@pytest.mark.parametrize("system", ["alise", "auto", "accelgen", "past-future"])
def test_a_connector_that_told_is_asked_again_only_after_a_preemption(system: str) -> None:
    rig = unwatched(system, max_num_seqs=1)
    asked: list[str] = []
    loads = _undecided(rig, system, 0)

    def can_tell(request: Request, _: int) -> bool:
        asked.append(request.request_id)
        return True

    loads.can_tell = can_tell  # type: ignore[method-assign]
    rig.add("other", 16, length=5, osl=5)
    rig.step(10, seconds=0.02)
    rig.scheduler.preempt_now(rig.scheduler.requests["run"], "memory", drop_output=True)
    rig.step(20, seconds=0.02)
    assert rig.running == ["run"]
    assert sorted(asked) == ["other", "run"]


@pytest.mark.parametrize("system", ["alise", "auto", "accelgen", "past-future"])
def test_a_connector_that_told_and_then_cannot_is_believed(system: str) -> None:
    """vLLM passes over the request once; from then on nobody's room is kept for it."""
    rig = unwatched(system, max_num_seqs=2)
    loads = _undecided(rig, system, 0)
    rig.add("changed", 16, length=5, osl=5)
    rig.scheduler.prefixes.can_tell(rig.scheduler.requests["changed"])
    loads.undecided.add("changed")
    rig.step(2, seconds=0.02)
    rig.add("other", 16, length=100, osl=100)
    assert _steps_until(rig, "other", 5) == 1


@pytest.mark.parametrize("system", [None, *SYSTEMS])
def test_who_was_undecided_joins_once_the_connector_can_tell(system: str | None) -> None:
    rig = unwatched(system)
    loads = _undecided(rig, system, 40)
    for _ in range(15):
        rig.step(seconds=0.02)
    told = sorted(loads.undecided)[20:]
    loads.undecided -= set(told)
    for _ in range(300):
        if not set(told) & set(rig.scheduler.requests):
            break
        rig.step(seconds=0.02)
    assert set(rig.scheduler.requests) <= loads.undecided | {"run"}


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_undecided_request_is_not_passed_for_ever_while_others_fill_the_engine(system: str) -> None:
    rig = unwatched(system)
    loads = _undecided(rig, system, 1)
    for i in range(60):
        rig.add(f"other-{i}", 16, length=20, osl=20)
    rig.step(5, seconds=0.02)
    loads.undecided.clear()
    for number in range(400):
        if number % 3 == 0:
            rig.add(f"more-{number}", 16, length=20, osl=20)
        rig.step(seconds=0.02)
        if "u0" not in rig.scheduler.requests:
            return
    raise AssertionError("never asked again")


@pytest.mark.parametrize("system", ["past-future"])
def test_a_gate_holds_for_who_was_undecided_as_well(system: str) -> None:
    """Twenty of whom the connector tells at once join one by one, as the forecast lets them."""
    rig = unwatched(system)
    loads = _undecided(rig, system, 20)
    rig.step(10, seconds=0.02)
    loads.undecided.clear()
    rig.scheduler.planner._gates = (Closed(),)
    rig.step(3, seconds=0.02)
    assert rig.running == ["run"]
    assert rig.state["refusals"].get("closed", 0) > 0


class Closed:
    """A gate that lets nobody in, and says so for each."""

    name, closed = "closed", False

    def gate(self, step: object) -> Closed:
        return self

    def fits(self, *_: object) -> bool:
        return False

    def take(self, *_: object) -> None:
        raise AssertionError("nobody fits")


def _undecided(rig: Rig, system: str | None, count: int) -> Loads:
    if system is None:
        rig.scheduler.prefixes = _Nowhere()
    loads = Loads(rig, {})
    rig.add("run", 16, length=400, osl=400)
    rig.step(seconds=0.02)
    for i in range(count):
        loads.undecided.add(f"u{i}")
        rig.add(f"u{i}", 128, length=5, osl=5)
    return loads


class _Nowhere:
    host: Any = None
