"""`vllm-ext profile`: the steps it times and the report it prints; vLLM itself is not started."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from vllm_ext.cli import profile as module
from vllm_ext.cli.profile import objectives_report, pivot_report, report
from vllm_ext.config import SloConfig
from vllm_ext.report.count_progress import CountProgress
from vllm_ext.step_time.fit import RegimeError, TermSupport
from vllm_ext.step_time.pivot_search import PivotFound
from vllm_ext.step_time.profile import Profile
from vllm_ext.step_time.runtime import Coefficients, Pivot, RuntimeModel, StepFeatures
from vllm_ext.systems import in_milliseconds

PROFILE = Profile(
    model="org/model",
    device="Some GPU",
    dtype="bfloat16",
    vllm_version="0.32.0",
    coefficients=Coefficients(1e-3, 2e-5, 3e-5, 4e-8, 5e-10),
    num_steps=1000,
    median_error=0.02,
    p90_error=0.1,
    regimes=(
        RegimeError(name="decode", num_steps=150, median_error=0.01, p90_error=0.05),
        RegimeError(name="mixed", num_steps=50, median_error=0.06, p90_error=0.3),
    ),
    terms=tuple(TermSupport(name=name, num_steps=800, uncertainty=0.01) for name in Coefficients._fields),
)


def test_the_report_tells_errors_by_kind_of_step() -> None:
    lines = report(PROFILE).splitlines()
    assert lines[0] == "1000 steps of org/model in bfloat16 on Some GPU"
    told = [line.split() for line in lines[2:5]]
    assert told == [
        ["all", "200", "2.0%", "10.0%"],
        ["decode", "150", "1.0%", "5.0%"],
        ["mixed", "50", "6.0%", "30.0%"],
    ]


def test_the_report_tells_the_objectives_of_sarathi_serve() -> None:
    """1 ms, 32 decodes of 20 us, 131,072 tokens of context at 40 ns: 6.88 ms."""
    said = objectives_report(PROFILE)
    assert "times 6.88 ms for 32 decodes of 4096 tokens" in said
    assert "--tbt-slo-ms 34.4 (strict, or 5x), --tbt-slo-ms 172 (relaxed, or 25x)" in said


def test_an_objective_of_the_report_is_what_its_multiple_comes_to() -> None:
    started = RuntimeModel(PROFILE.coefficients)
    for times, told_ms in (("5x", 34.4), ("25x", 172.0)):
        assert in_milliseconds(SloConfig(tbt_ms=times), lambda: started) == SloConfig(tbt_ms=told_ms)


def test_the_report_tells_what_the_steps_had_no_data_for() -> None:
    terms = (
        *PROFILE.terms[:3],
        TermSupport(name="context_token_s", num_steps=800, uncertainty=0.4),
        TermSupport(name="pair_s", num_steps=0, uncertainty=1.0),
    )
    lines = report(replace(PROFILE, terms=terms, tensor_parallel_size=4)).splitlines()
    assert lines[0].endswith("tensor-parallel size 4")
    noted = {line.split()[0]: line.partition("%")[2].strip() for line in lines[-5:]}
    assert noted == {
        "base_s": "",
        "decode_s": "",
        "prefill_token_s": "",
        "context_token_s": "too little data",
        "pair_s": "too little data, default kept",
    }


def told(saturated: bool, pivot: int) -> list[str]:
    times = {16: 0.01, 32: 0.0125, 64: 0.025}
    return pivot_report(PivotFound(pivot=Pivot(pivot, times[pivot]), saturated=saturated, times=times)).splitlines()


def test_the_pivot_report_lists_the_steps_and_marks_the_pivot() -> None:
    lines = told(True, 32)
    assert [line.split() for line in lines[1:4]] == [
        ["16", "tokens", "10.00", "1600"],
        ["32", "tokens", "12.50", "2560", "pivot"],
        ["64", "tokens", "25.00", "2560"],
    ]
    assert lines[4] == "pivot forward size: 32 tokens, the smallest step with 95% of the best throughput"


def test_the_pivot_report_admits_that_throughput_still_rises() -> None:
    assert told(False, 64)[-1].startswith("pivot forward size: 64 tokens, the largest step: throughput still rises")


def test_the_pivot_report_tells_that_it_is_saturated_at_once() -> None:
    assert told(True, 16)[-1].startswith("pivot forward size: 16 tokens, the smallest step measured")


def test_the_pivot_report_tells_that_nothing_was_measured() -> None:
    assert pivot_report(None).startswith("pivot forward size: not measured")


class Engine:
    """Runs prompts in steps of at most ``budget`` tokens, at a millisecond per token; notes what it ran."""

    def __init__(self, budget: int, duration_s: Callable[[int], float] | None = None) -> None:
        self.recorder = module._Recorder()
        self.ran: list[list[int]] = []
        self._budget = budget
        self._duration_s = duration_s or (lambda run: 1e-3 * sum(self.ran[run]))

    def run_prompts(self, prompt_tokens: Sequence[int]) -> None:
        self.ran.append(list(prompt_tokens))
        left = sum(prompt_tokens)
        while left:
            tokens = min(self._budget, left)
            left -= tokens
            self.recorder.observe(StepFeatures(0, tokens, tokens), self._duration_s(len(self.ran) - 1))

    def steps(self, seats: int = 8) -> Any:
        runner: Any = self
        progress = CountProgress(10, label="pivot", unit="size", stream=io.StringIO())
        return module._PromptSteps(runner, self.recorder, seats, 1000, progress)


def test_a_step_is_timed_by_the_median_of_its_repeats_without_the_first() -> None:
    engine = Engine(2048, lambda run: (60.0, 0.4, 0.3, 9.0, 0.3)[run])
    assert engine.steps()(1024) == 0.4
    assert engine.ran == [[512, 512]] * 4, "three repeats of a step that is not short, and one before"


def test_short_steps_are_repeated_more_often() -> None:
    engine = Engine(2048)
    assert engine.steps()(16) == pytest.approx(0.016)
    assert len(engine.ran) == 16


def test_prompts_that_do_not_make_one_step_are_no_measurement() -> None:
    assert Engine(1000).steps()(1024) is None


def test_a_server_is_profiled_without_what_its_profile_is_for() -> None:
    ours = {"slo": {"tbt_ms": "5x"}, "profile": "auto", "kv_tier": {"gib": 1}}
    found = module.without_profile({"vllm_ext": ours, "other": 1})
    assert found == {"vllm_ext": {"kv_tier": {"gib": 1}}, "other": 1}
    assert module.without_profile(None) is None
