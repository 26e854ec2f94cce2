"""The record of a scheduler's calls: what goes in, what stays out, and the hooks that put it into an engine core."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_ext import envs
from vllm_ext.simulation.recorded import recorder
from vllm_ext.simulation.recorded.recorder import StepRecord


@pytest.fixture
def installed() -> Iterator[None]:
    undo = recorder.install()
    yield
    undo()


def scheduler_config(scheduler_cls: str | None = None) -> Any:
    from vllm.config.scheduler import SchedulerConfig

    return SchedulerConfig.default_factory(scheduler_cls=scheduler_cls)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "name",
    [None, "vllm.v1.core.sched.async_scheduler.AsyncScheduler", "vllm_ext.scheduling.scheduler.SteeredScheduler"],
    ids=["upstream", "upstream-by-name", "ours"],
)
def test_every_scheduler_class_an_engine_asks_for_records(name: str | None) -> None:
    cls: Any = scheduler_config(name).get_scheduler_cls()
    assert issubclass(cls, recorder.Recording)
    assert f"{cls.recorded_class.__module__}.{cls.recorded_class.__qualname__}" == (
        name or "vllm.v1.core.sched.scheduler.Scheduler"
    )
    assert recorder.recorded(cls) is cls, "it would record everything twice"


def test_second_install_changes_nothing_and_undo_restores_upstream() -> None:
    from vllm.config.scheduler import SchedulerConfig
    from vllm.v1.engine.core import EngineCore

    original = vars(SchedulerConfig)["get_scheduler_cls"]
    undo = recorder.install()
    hooked = vars(SchedulerConfig)["get_scheduler_cls"]
    recorder.install()()
    assert hooked is not original
    assert vars(SchedulerConfig)["get_scheduler_cls"] is hooked
    assert hasattr(EngineCore, recorder.UTILITY)
    undo()
    assert vars(SchedulerConfig)["get_scheduler_cls"] is original
    assert not hasattr(EngineCore, recorder.UTILITY)


def test_hooks_are_verified_with_the_installed_vllm() -> None:
    assert recorder.PATCH.verify() == "as verified"
    assert recorder.ADDITION.verify() == "name is free"


@pytest.mark.parametrize(("value", "wanted"), [(None, False), ("0", False), ("1", True)])
def test_environment_switches_it_on(monkeypatch: pytest.MonkeyPatch, value: str | None, wanted: bool) -> None:
    monkeypatch.delenv(envs.BENCH_STEP_RECORD, raising=False)
    if value is not None:
        monkeypatch.setenv(envs.BENCH_STEP_RECORD, value)
    assert envs.bench_step_record() is wanted


def test_other_values_of_the_environment_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.BENCH_STEP_RECORD, "true")
    with pytest.raises(ValueError, match=r"VLLM_EXT_BENCH_STEP_RECORD='true': must be 0 or 1"):
        envs.bench_step_record()


def noted(record: StepRecord, number: int) -> None:
    with record.call() as entry:
        assert entry is not None
        entry.update(type="call", number=number)


def numbers(record: StepRecord) -> list[int]:
    return [entry["number"] for entry in record.entries]


def test_full_record_keeps_its_beginning_without_gaps_and_counts_the_rest() -> None:
    record = StepRecord(capacity=10)
    for number in range(3):
        noted(record, number)
    with record.call() as entry:
        assert entry is not None
        entry.update(number=3, prompt=tuple(range(50)))
    noted(record, 4)  # would fit, and would be a gap
    assert numbers(record) == [0, 1, 2]
    assert record.dropped == 2


def test_calls_inside_of_recorded_calls_are_left_to_the_replay() -> None:
    record = StepRecord()
    with record.call() as outer:
        assert outer is not None
        outer["number"] = 0
        with record.call() as inner:
            assert inner is None
    assert numbers(record) == [0]


def test_call_that_raises_leaves_no_entry_and_the_next_one_is_recorded() -> None:
    record = StepRecord()
    with pytest.raises(ValueError), record.call():
        raise ValueError("refused")
    noted(record, 1)
    assert numbers(record) == [1]


def test_clock_readings_are_kept_to_the_last_bit_and_only_those_of_calls() -> None:
    record = StepRecord()
    readings = iter([0.1, 0.1 + 0.2, 1e6 / 3, 5.0])
    with record.call() as entry:
        assert entry is not None
        record.read(readings.__next__)
        record.read(readings.__next__)
    record.read(readings.__next__)  # somebody looks at the state from outside
    noted(record, 1)
    lines = [json.loads(line) for line in record.since(0)["lines"]]
    assert [line["clock"] for line in lines] == [[0.1, 0.30000000000000004], []]


def test_long_records_are_fetched_in_parts_that_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_CHUNK", 2)
    record = StepRecord()
    for number in range(5):
        noted(record, number)
    fetched: list[int] = []
    parts = 0
    following: int | None = 0
    while following is not None:
        part = record.since(following)
        fetched += [json.loads(line)["number"] for line in part["lines"]]
        following = part["next"]
        parts += 1
    assert (fetched, parts) == ([0, 1, 2, 3, 4], 3)


def test_empty_record_can_be_fetched() -> None:
    assert StepRecord().since(0) == {"settings": {}, "lines": [], "next": None, "dropped": 0}
