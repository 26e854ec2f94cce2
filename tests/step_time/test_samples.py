"""Steps of production traffic: kept until they are fetched, written as lines, and fitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.steering import Rig
from vllm_ext.cli import profile as command
from vllm_ext.simulation.cost.fitted import Fitted
from vllm_ext.simulation.cost.step_shape import StepShape
from vllm_ext.step_time import samples
from vllm_ext.step_time.profile import EngineKey, load
from vllm_ext.step_time.runtime import RuntimeModel, StepFeatures
from vllm_ext.step_time.samples import StepSamples
from vllm_ext.step_time.step_record import profile_of

from .runtime_steps import TRUE, Steps

KEY = EngineKey("my-model", "NVIDIA H100", "bfloat16", 2)


def recorded(path: Path, count: int = 400, *, key: EngineKey = KEY) -> Path:
    steps, kept = Steps(), StepSamples(key, "0.32.0")
    for _ in range(count):
        found = steps.features()
        kept.observe(found, steps.duration(found))
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in kept.take())
    return path


def test_a_scheduler_that_is_told_to_hands_out_what_it_measured_once() -> None:
    rig = Rig("fcfs", options={"step_record": "steps.jsonl"})
    rig.add("a", length=50)
    rig.add("b", length=50)
    for number in range(60):  # the clock of a rig moves when it is told to, also while a step is computed
        read = iter((100.0 + number, 100.5 + number))
        rig.scheduler.clock = lambda read=read: next(read, 101.0)
        rig.step()
    header, *rows = rig.scheduler.vllm_ext_state()["steps_measured"]
    assert header["format"] == samples.FORMAT
    assert header["vllm_version"]
    assert len(rows) >= 20
    assert all(len(row) == 5 and row[-1] > 0 for row in rows)
    assert max(row[0] for row in rows) == 2, "two decoded at a time"
    assert rig.scheduler.vllm_ext_state()["steps_measured"] == []
    assert "steps_measured" not in Rig("fcfs").scheduler.vllm_ext_state()


def test_no_more_are_kept_than_a_fit_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MOST", 5)
    kept = StepSamples(KEY, "0.32.0")
    for _ in range(3):
        kept.observe(StepFeatures(1, 0, 9), 0.5)
    assert len(kept.take()) == 1 + 3
    for _ in range(9):
        kept.observe(StepFeatures(1, 0, 9), 0.5)
    assert kept.take() == [(1, 0, 9, 0.0, 0.5)] * 2


def test_steps_of_two_starts_make_the_model_that_they_are_of(tmp_path: Path) -> None:
    path = recorded(recorded(tmp_path / "steps.jsonl"))
    profile = profile_of(path)
    assert (profile.key, profile.num_steps, profile.vllm_version) == (KEY, 800, "0.32.0")
    assert profile.coefficients.base_s == pytest.approx(TRUE.base_s, rel=0.01)
    assert profile.coefficients.pair_s == pytest.approx(TRUE.pair_s, rel=0.01)
    assert profile.median_error < 1e-3


def test_they_are_costs_of_a_simulation_and_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = recorded(tmp_path / "steps.jsonl"), tmp_path / "profile.json"
    cost = Fitted.load(path)
    expected = RuntimeModel(TRUE).step_time_s(StepFeatures(8, 0, 8 * 500))
    assert cost.device_s(StepShape.of_decodes(8, 500)) == pytest.approx(expected, rel=0.01)
    assert command.main(["--steps", str(path), "--out", str(out)]) == 0
    assert load(out) == profile_of(path)
    assert "400 steps of my-model in bfloat16 on NVIDIA H100" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("[1, 2]\n", "line 402: "),
        ("nonsense\n", "line 402: "),
        ('["a", 0, 1, 0.0, 0.5]\n', "line 402: "),
        (json.dumps({"format": samples.FORMAT, "model": "another"}) + "\n", "keep a file for each engine"),
    ],
)
def test_what_is_no_step_is_named_with_its_line(tmp_path: Path, more: str, said: str) -> None:
    path = recorded(tmp_path / "steps.jsonl")
    with path.open("a", encoding="utf-8") as file:
        file.write(more)
    with pytest.raises(ValueError, match=r"steps\.jsonl: ") as caught:
        Fitted.load(path)
    assert said in str(caught.value)


def test_too_few_steps_and_another_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"few\.jsonl: .*steps"):
        profile_of(recorded(tmp_path / "few.jsonl", 20))
    (tmp_path / "other.jsonl").write_text('{"format": "other"}\n[1, 0, 9, 0.0, 0.5]\n')
    with pytest.raises(ValueError, match=r"other\.jsonl: is no record of steps"):
        profile_of(tmp_path / "other.jsonl")
