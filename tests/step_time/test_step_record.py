"""A file of steps: what is fitted to it, what is left out, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_ext.cli import profile as command
from vllm_ext.metrics.step_record import StepRecord
from vllm_ext.simulation.cost.fitted import Fitted
from vllm_ext.simulation.cost.step_shape import StepShape
from vllm_ext.step_time import samples
from vllm_ext.step_time.profile import EngineKey, load
from vllm_ext.step_time.runtime import RuntimeModel, StepFeatures
from vllm_ext.step_time.samples import StepSamples
from vllm_ext.step_time.step_record import Record

from .runtime_steps import TRUE, Steps

KEY = EngineKey("my-model", "NVIDIA H100", "bfloat16", 2)


def recorded(path: Path, count: int = 400, *, key: EngineKey = KEY) -> Path:
    steps, kept = Steps(), StepSamples(key, "0.32.0")
    for _ in range(count):
        found = steps.features()
        kept.observe(found, steps.duration(found))
    taken = kept.take()
    assert taken is not None
    StepRecord(path).append(*taken)
    return path


def test_steps_of_two_starts_make_the_model_that_they_are_of(tmp_path: Path) -> None:
    path = recorded(recorded(tmp_path / "steps.jsonl"))
    profile = Record.read(path).profile()
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
    assert load(out) == Record.read(path).profile()
    assert "400 steps of my-model in bfloat16 on NVIDIA H100" in capsys.readouterr().out


@pytest.mark.parametrize("goes_on", [False, True])
def test_half_a_line_is_left_out_and_reported(
    tmp_path: Path, goes_on: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a server died; when it starts again it begins on a line of its own."""
    path = recorded(tmp_path / "steps.jsonl")
    path.write_bytes(path.read_bytes()[:-9])
    if goes_on:
        recorded(path)
    assert command.main(["--steps", str(path), "--out", str(tmp_path / "out.json")]) == 0
    said = capsys.readouterr().out
    assert f"{799 if goes_on else 399} steps of my-model" in said
    assert "steps.jsonl: half a line, left out, is line 401" in said
    assert "half a line, left out, is line 401" in Fitted.load(path).notes[-1]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("[1, 2]\n", "line 402: num_context_tokens: Field required"),
        ("nonsense\n", "line 402: Invalid JSON"),
        ('[12, 0, 3{"format": "' + samples.FORMAT + '"}\n', "line 402: Invalid JSON"),
        ('["a", 0, 1, 0.0, 0.5]\n', "line 402: num_decodes: Input should be a valid integer (found 'a')"),
        ('"12345"\n', "line 402: Input should be a valid array (found '12345')"),
        ("[1, -2, 3, 0.0, 0.5]\n", "line 402: num_prefill_tokens: Input should be greater than or equal to 0"),
        ("[1, 2, 3, NaN, 0.5]\n", "line 402: prefill_context: Input should be"),
        ("[1, 2, 3, 1.0, Infinity]\n", "line 402: seconds: Input should be"),
        ("[1, 2, 3, 1.0, 0]\n", "line 402: seconds: Input should be greater than 0"),
        ("[1, 2, " + "9" * 400 + ", 1.0, 0.5]\n", "line 402: num_context_tokens: Input should be"),
        ("{" * 100_000 + "\n", "line 402: "),
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
    assert "\n" not in str(caught.value)


def test_too_few_steps_and_another_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"few\.jsonl: .*steps"):
        Record.read(recorded(tmp_path / "few.jsonl", 20)).profile()
    (tmp_path / "other.jsonl").write_text('{"format": "other"}\n[1, 0, 9, 0.0, 0.5]\n')
    with pytest.raises(ValueError, match=r"other\.jsonl: is no record of steps"):
        Record.read(tmp_path / "other.jsonl")
