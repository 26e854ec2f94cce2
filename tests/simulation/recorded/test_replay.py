"""A recorded run, repeated in virtual time, decides the same; what differs is named."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.simulation.recorded.recording import Add, Run, Step, Update
from vllm_ext.simulation.recorded.replay import ReplayError, replay

from .recorded_runs import SYSTEMS, record


@pytest.fixture(scope="module")
def alise(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return record(tmp_path_factory.mktemp("recording") / "alise.jsonl.gz", "alise")


def changed(run: Run, index: int, **fields: Any) -> Run:
    """The same run with other fields in one entry."""
    entries: list[Any] = list(run.entries)
    entries[index] = entries[index].model_copy(update=fields)
    return replace(run, entries=tuple(entries))


def first(run: Run, kind: type, at_least: int = 0) -> int:
    return next(i for i, entry in enumerate(run.entries) if isinstance(entry, kind) and i >= at_least)


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_replay_in_virtual_time_decides_what_was_decided_under_the_real_clock(
    tmp_path: Path, system: str, depth: int
) -> None:
    run = record(tmp_path / "run.jsonl", system, depth=depth)
    result = replay(run)
    assert result.divergence is None
    assert result.steps == result.total_steps > 100
    assert result.requests == 40
    assert not result.scheduler.requests


def test_run_without_prefix_caching_is_repeated_too(tmp_path: Path) -> None:
    assert replay(record(tmp_path / "run.jsonl", "alise", caching=False)).divergence is None


def test_replay_learns_what_the_recorded_run_learned(alise: Run) -> None:
    """Else equal decisions would only show that nothing depends on what is learned."""
    scheduler: Any = replay(alise).scheduler
    assert scheduler.tracked.runtime.num_observations > 20
    assert scheduler.observer.counters.preemptions["policy"] > 5
    assert any(hit for entry in alise.of_type(Step) for hit in entry.computed if entry.new)


def test_no_wall_clock_has_a_part_in_a_replay(alise: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: -1.0)
    monkeypatch.setattr(time, "time", lambda: -1.0)
    assert replay(alise).divergence is None


def test_other_clock_readings_lead_to_other_decisions(alise: Run) -> None:
    """The readings do matter: with all of them scaled, ages and learned step times are others."""
    entries: list[Any] = [
        entry.model_copy(update={"clock": tuple(1000 * reading for reading in entry.clock)}) for entry in alise.entries
    ]
    assert replay(replace(alise, entries=tuple(entries))).divergence is not None


def test_first_other_decision_is_named_with_its_line_and_both_sides(alise: Run) -> None:
    index = first(alise, Step, 30)
    step: Step = alise.entries[index]  # type: ignore[assignment]
    (req_id, tokens), *others = step.scheduled
    found = replay(changed(alise, index, scheduled=((req_id, tokens + 1), *others))).divergence
    assert found is not None
    assert found.line == alise.lines[index]
    text = str(found)
    assert f"line {alise.lines[index]}" in text
    assert f"step {step.step} decides otherwise: scheduled" in text
    assert str((req_id, tokens + 1)) in text
    assert str((req_id, tokens)) in text


@pytest.mark.parametrize(
    ("kind", "change", "problem"),
    [
        (Step, lambda entry: {"clock": entry.clock[:-1]}, "read more often"),
        (Step, lambda entry: {"clock": (*entry.clock, entry.clock[-1])}, "read less often"),
        (
            Update,
            lambda entry: {"finished": tuple((name, "length") for name, _ in entry.finished)},
            "ends other requests",
        ),
    ],
    ids=["fewer readings", "more readings", "other end"],
)
def test_every_other_difference_is_named(
    alise: Run, kind: type, change: Callable[[Any], dict[str, Any]], problem: str
) -> None:
    index = next(
        index
        for index, entry in enumerate(alise.entries)
        if isinstance(entry, kind) and (kind is Step or getattr(entry, "finished", ()))
    )
    found = replay(changed(alise, index, **change(alise.entries[index]))).divergence
    assert found is not None
    assert problem in found.what


def test_feature_that_is_not_modelled_is_refused_with_its_line(alise: Run) -> None:
    index = first(alise, Add)
    with pytest.raises(ReplayError, match=rf"line {alise.lines[index]}: field 'unsupported': LoRA can't be replayed"):
        replay(changed(alise, index, unsupported=("LoRA",)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("speculative_tokens", 3),
        ("connector", "OffloadingConnector"),
        ("kv_groups", ("MambaSpec",)),
        ("scheduler_cls", "nowhere.Scheduler"),
    ],
)
def test_setting_that_cannot_be_rebuilt_is_refused_by_name(alise: Run, field: str, value: Any) -> None:
    settings = alise.header.settings.model_copy(update={field: value})
    header = alise.header.model_copy(update={"settings": settings})
    with pytest.raises(ReplayError, match=rf"{field}="):
        replay(replace(alise, header=header))


def test_update_of_a_step_that_was_not_scheduled_is_refused(alise: Run) -> None:
    index = first(alise, Update)
    with pytest.raises(ReplayError, match="field 'step': 9999"):
        replay(changed(alise, index, step=9999))
