"""Steps of production traffic, kept until they are fetched."""

from __future__ import annotations

import pytest

from tests.support.steering import Rig
from vllm_ext.step_time import samples
from vllm_ext.step_time.profile import EngineKey
from vllm_ext.step_time.runtime import StepFeatures
from vllm_ext.step_time.samples import StepSamples

KEY = EngineKey("my-model", "NVIDIA H100", "bfloat16", 2)


def test_a_scheduler_that_is_told_to_hands_out_what_it_measured_once() -> None:
    rig = Rig("fcfs", options={"step_record": "steps.jsonl"})
    rig.add("a", length=50)
    rig.add("b", length=50)
    for number in range(60):  # the clock of a rig moves when it is told to, also while a step is computed
        read = iter((100.0 + number, 100.5 + number))
        rig.scheduler.clock = lambda read=read: next(read, 101.0)
        rig.step()
    assert rig.scheduler.vllm_ext_state(2**62)["records"] == [], "as load shedding asks, which wants no steps"
    header, rows = rig.scheduler.vllm_ext_state()["steps_measured"]
    assert header["format"] == samples.FORMAT
    assert header["vllm_version"]
    assert len(rows) >= 20
    assert all(len(row) == 5 and row[-1] > 0 for row in rows)
    assert max(row[0] for row in rows) == 2, "two decoded at a time"
    assert rig.scheduler.vllm_ext_state()["steps_measured"] is None
    assert "steps_measured" not in Rig("fcfs").scheduler.vllm_ext_state()


def test_no_more_are_kept_than_a_fit_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MOST", 5)
    kept = StepSamples(KEY, "0.32.0")
    for _ in range(3):
        kept.observe(StepFeatures(1, 0, 9), 0.5)
    taken = kept.take()
    assert taken is not None
    assert len(taken[1]) == 3
    for _ in range(9):
        kept.observe(StepFeatures(1, 0, 9), 0.5)
    taken = kept.take()
    assert taken is not None
    assert taken[1] == [(1, 0, 9, 0.0, 0.5)] * 2
    assert kept.take() is None
