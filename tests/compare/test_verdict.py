"""What is called better, worse or the same: by known differences, and by chance alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.paper_servers import Paper
from vllm_ext.compare import rounds
from vllm_ext.compare.observed import MEAN, MEASURES, P99, Observed, measured, pooled
from vllm_ext.compare.rounds import Asked, Cells, Found, compare
from vllm_ext.compare.servers import Row
from vllm_ext.compare.verdict import Verdict, noise, ratio, who_pays
from vllm_ext.report.intervals import Ratio
from vllm_ext.simulation.workloads.spec import WorkloadSpec

SERVERS: dict[str, Any] = {"baseline": Row("upstream"), "twin": Row("upstream, again"), "others": [Row("other")]}


def run_of(e2e: list[float], **changes: list[float]) -> Observed:
    count = len(e2e)
    columns = {
        "arrival_s": list(map(float, range(count))), "ttft_s": [0.5 * one for one in e2e], "e2e_s": e2e,
        "longest_gap_s": [0.1] * count, "output_tokens": [10.0] * count, "prompt_tokens": [5.0] * count,
        "on_time": [np.nan] * count, **changes,
    }  # fmt: skip
    return Observed(**{name: np.array(values) for name, values in columns.items()})


def test_twice_as_fast_is_two_whatever_is_drawn() -> None:
    base = [1.0 + n % 7 for n in range(80)]
    found = ratio(MEASURES[MEAN], [run_of([one / 2 for one in base])], [run_of(base)])
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_repeats_are_pooled_but_goodput_is_that_of_a_run() -> None:
    """Each of which begins at 0: together they would have served as many requests in a fraction of the time."""
    runs = [run_of([1.0] * 8, on_time=[1.0] * 8), run_of([3.0] * 8, on_time=[1.0, 0.0] * 4)]
    found = pooled(runs)
    assert (found["mean e2e"], found["on time"]) == (2.0, 0.75)
    assert found["goodput"] == pytest.approx((8 / 8 + 4 / 10) / 2)
    assert "goodput" not in pooled([run_of([1.0] * 8)])


def test_a_share_that_is_larger_is_better() -> None:
    ours, base = run_of([1.0] * 8, on_time=[1.0] * 8), run_of([1.0] * 8, on_time=[1.0, 0.0] * 4)
    assert ratio(MEASURES["on time"], [ours], [base]).value == 2.0
    assert measured(run_of([1.0] * 8)).keys().isdisjoint({"on time", "goodput"}), "nobody had objectives"


def test_who_has_no_answer_was_not_on_time() -> None:
    run = run_of([1.0, np.nan], on_time=[1.0, 0.0])
    assert (run.failed, measured(run)["on time"], measured(run)[MEAN]) == (1, 0.5, 1.0)


def test_requests_that_failed_on_one_side_are_left_out_of_both() -> None:
    ours, base = run_of([1.0, np.nan, 1.0, 1.0]), run_of([2.0, 50.0, 2.0, np.nan])
    assert ratio(MEASURES[MEAN], [ours], [base]).value == 2.0


@pytest.mark.parametrize(
    ("found", "noise", "kind"),
    [
        ((1.2, 1.1, 1.3), (1.0, 0.95, 1.05), "better"),
        ((0.8, 0.7, 0.9), (1.0, 0.95, 1.05), "worse"),
        ((1.2, 0.9, 1.5), (1.0, 0.95, 1.05), "same"),
        ((1.2, 1.1, 1.3), (1.1, 0.95, 1.25), "same"),
    ],
)
def test_what_lies_within_the_noise_or_holds_1_is_no_difference(found: tuple, noise: tuple, kind: str) -> None:  # type: ignore[type-arg]
    one = Verdict(server="a", load=1.0, measure=MEAN, ratio=Ratio(*found), noise=Ratio(*noise))
    assert one.kind == kind


def test_of_one_repeat_next_to_nothing_is_known_of_chance() -> None:
    base, again = run_of([1.0] * 16), run_of([1.1] * 16)
    once, often = (noise(MEASURES[MEAN], [again] * many, [base] * many) for many in (1, 10))
    assert once.value == often.value == pytest.approx(1 / 1.1)
    assert once.high > 3
    assert 1.05 < often.high < 1.1


def test_who_pays_is_named_by_length_and_class() -> None:
    base = run_of([1.0] * 100, prompt_tokens=[float(n) for n in range(100)])
    ours = run_of([3.0 if n >= 80 else 0.5 for n in range(100)], prompt_tokens=[float(n) for n in range(100)])
    batch = np.arange(100) % 2 == 1
    lines = list(who_pays([ours], [base], {"class batch": [batch], "class chat": [np.arange(100) < 50]}))
    assert lines == ["prompts of 79 to 99 tokens: mean end-to-end latency 3.00 times as long"]


def found_by(slower: float, seed: int, folder: Path) -> Verdict:
    workload = WorkloadSpec(source="fixed:20:8", num_requests=100, seed=1000 * seed)
    asked = Asked(**SERVERS, workload=workload, loads=(0.8,), requests=100, precision=1.0, budget_s=1e9)
    found, mean = Found(), MEASURES[MEAN]
    compare(Paper({"other": slower}), Cells(folder, str(seed)), asked, lambda _: None, found)
    repeats, (ours, base, again) = found.pairs("other", asked, 0.8)
    assert len(repeats) >= 2
    return Verdict(server="other", load=0.8, measure=MEAN, ratio=ratio(mean, ours, base, resamples=200),
                   noise=noise(mean, again, base))  # fmt: skip


def test_equal_servers_are_hardly_ever_told_apart_and_different_ones_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 seeds: two servers that differ by chance alone, and one whose service takes a quarter longer."""
    monkeypatch.setattr(rounds, "LEAST_REPEATS", 3)
    equal = [found_by(1.0, seed, tmp_path / "equal").kind for seed in range(20)]
    slower = [found_by(1.25, seed, tmp_path / "slower").kind for seed in range(20)]
    assert equal.count("same") >= 19
    assert slower == ["worse"] * 20


def test_the_tail_is_judged_too(tmp_path: Path) -> None:
    workload = WorkloadSpec(source="fixed:20:8", num_requests=200)
    asked = Asked(**SERVERS, workload=workload, loads=(0.8,), requests=200, precision=0.05, budget_s=1e9)
    found = Found()
    compare(Paper({"other": 1.3}), Cells(tmp_path, ""), asked, lambda _: None, found)
    assert {one.measure: one.kind for one in found.verdicts(asked)}[P99] == "worse"
