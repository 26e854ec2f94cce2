"""Predictions that come after their request was queued: whose word counts, what they change, and outlived estimates."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.distributions import nine
from tests.support.steering import Rig, play, save_profile, workload
from vllm_ext.contract.length_distribution import LengthDistribution


@pytest.fixture
def one_seat(tmp_path: Path) -> dict[str, Any]:
    """Options with which nobody is preempted and times follow lengths."""
    return {
        "profile": save_profile(tmp_path / "profile.json"), "admission": {"preempt": False},
        "prediction": {"sources": ["hint", "retrieval", "history"]},
    }  # fmt: skip


def queue(options: dict[str, Any], **osl: int) -> Rig:
    """One request runs, the others wait."""
    rig = Rig(options=options, max_num_seqs=1)
    rig.add("running", length=100, osl=100)
    rig.step()
    for name, tokens in osl.items():
        rig.add(name, osl=tokens or None)
    return rig


def test_a_batch_of_predictions_moves_what_it_knows_better(one_seat: dict[str, Any]) -> None:
    rig = queue(one_seat, a=0, b=0, c=0)
    assert rig.waiting == ["a", "b", "c"]
    taken = rig.scheduler.update_predictions(
        [["c", nine(5, 9), "retrieval"], ["a", nine(60), "decoder"], ["gone", nine(1), "x"]]
    )
    assert taken == 2
    assert rig.waiting == ["c", "a", "b"]
    assert rig.state["late_predictions"] == 2
    rig.drain()
    assert (rig.record("c")["prediction_source"], rig.record("c")["predicted_tokens"]) == ("retrieval", 5)
    assert (rig.record("a")["prediction_source"], rig.record("a")["predicted_tokens"]) == ("decoder", 60)


def test_what_the_client_said_counts_more_by_default(one_seat: dict[str, Any]) -> None:
    rig = queue(one_seat, a=20, b=30)
    assert rig.scheduler.update_predictions([["b", nine(5, 9), "retrieval"]]) == 0
    assert rig.waiting == ["a", "b"]


def test_the_order_of_sources_decides(one_seat: dict[str, Any]) -> None:
    rig = queue({**one_seat, "prediction": {"sources": ["retrieval", "hint", "history"]}}, a=20, b=30)
    assert rig.scheduler.update_predictions([["b", nine(5, 9), "retrieval"]]) == 1
    assert rig.waiting == ["b", "a"]
    rig.drain()
    assert (rig.record("b")["prediction_source"], rig.record("a")["prediction_source"]) == ("retrieval", "hint")


def test_without_the_source_nothing_is_taken_over(one_seat: dict[str, Any]) -> None:
    rig = queue({**one_seat, "prediction": {"sources": ["history"]}}, a=0, b=0)
    assert rig.scheduler.update_predictions([["b", nine(5, 9), "retrieval"]]) == 0
    assert rig.waiting == ["a", "b"]


@pytest.mark.parametrize(
    "row",
    [
        ["b", nine(5)[1:], "x"],
        ["b", [0, *nine(5)[1:]], "x"],
        ["b", nine(5, 9)[::-1], "x"],
        ["b", [*nine(5)[:8], math.nan], "x"],
        ["b", [*nine(5)[:8], "9"], "x"],
        ["b", None, "x"],
        ["b", 5, "x"],
    ],
    ids=str,
)
def test_what_is_no_prediction_is_passed_over(one_seat: dict[str, Any], row: list[Any]) -> None:
    rig = queue(one_seat, a=0, b=0)
    assert rig.scheduler.update_predictions([row, ["a", nine(300), "x"]]) == 1
    assert rig.waiting == ["b", "a"]


def test_a_prediction_is_cut_at_the_clients_bound(one_seat: dict[str, Any]) -> None:
    rig = Rig(options=one_seat)
    rig.add("a", length=8, max_tokens=10)
    rig.scheduler.update_predictions([["a", nine(500, 900), "retrieval"]])
    assert rig.scheduler.tracked["a"].estimate == 10
    rig.drain()
    assert rig.record("a")["predicted_tokens"] == 10


def test_a_prediction_that_comes_when_it_is_outlived_is_doubled_without_a_demotion(one_seat: dict[str, Any]) -> None:
    rig = Rig(options=one_seat)
    rig.add("a", length=60)
    rig.step(33)
    generated = rig.scheduler.requests["a"].num_output_tokens
    assert generated > 20
    rig.scheduler.update_predictions([["a", nine(3, 4), "retrieval"]])
    estimates = [3 * 2**k for k in range(8)]
    assert rig.scheduler.tracked["a"].estimate == next(e for e in estimates if e > generated)
    assert rig.scheduler.tracked["a"].demotions == 0


def test_an_outlived_estimate_follows_the_law_behind_it(one_seat: dict[str, Any]) -> None:
    """Log-normal through P50 = 10 and P90 = 40: each time it is outlived, the median of what is longer."""
    rig = Rig(options={**one_seat, "prediction": {"refresh": "conditional", "sources": ["hint", "retrieval"]}})
    rig.add("a", length=100)
    rig.scheduler.update_predictions([["a", nine(10, 40), "retrieval"]])
    job = rig.scheduler.tracked["a"]
    history = []
    while rig.loop.has_work:
        rig.step()
        history.append((job.estimate, job.demotions))
    distribution = LengthDistribution.through(nine(10, 40))
    expected, at = [10], 10
    while at < 100:
        at = distribution.quantile(0.5, at)
        expected.append(at)
    seen = [history[0], *(b for a, b in itertools.pairwise(history) if a != b)]
    assert [estimate for estimate, _ in seen] == expected[: len(seen)]
    assert [demotions for _, demotions in seen] == list(range(len(seen)))
    assert len(seen) > 2


def test_an_outlived_estimate_of_the_history_follows_its_window(one_seat: dict[str, Any]) -> None:
    rig = Rig(options={**one_seat, "prediction": {"refresh": "conditional", "sources": ["history"]}})
    for number, length in enumerate([5, 5, 5, 5, 5, 80, 80]):
        rig.add(f"past{number}", length=length)
        rig.drain()
    rig.add("a", length=60)
    job = rig.scheduler.tracked["a"]
    assert job.estimate == 5
    rig.step(10)
    assert job.estimate == pytest.approx(80, rel=0.1), "those that were longer than 5 had 80"
    assert job.demotions == 1


def test_a_hint_without_a_distribution_is_doubled_all_the_same(one_seat: dict[str, Any]) -> None:
    rig = Rig(options={**one_seat, "prediction": {"refresh": "conditional", "sources": ["hint", "retrieval"]}})
    rig.add("a", length=30, osl=4)
    rig.step(6)
    assert rig.scheduler.tracked["a"].estimate == 8


@pytest.mark.parametrize("blocks", [400, 24], ids=["ample memory", "little memory"])
def test_lengths_refined_while_decoding_change_no_decision_of_alise(blocks: int) -> None:
    """What a probe on the model's hidden states could tell is worth nothing to an order of those who wait."""

    def decisions(*, refined: bool) -> list[object]:
        sources = {"prediction": {"sources": ["hint", "retrieval", "history"]}}
        rig = Rig("alise", options=sources, num_blocks=blocks, max_num_seqs=4)
        rng, found = random.Random(0), list[object]()

        def each_step(rig: Rig) -> None:
            found.append((sorted(rig.running), rig.waiting))
            if refined:
                rows = [[name, [rng.randint(1, 300)] * 9, "probe"] for name in rig.running]
                assert rig.scheduler.update_predictions(rows) == len(rows)

        jobs = [replace(job, osl=None, length=3 * job.length) for job in workload(40, gap=2.0)]
        play(rig, jobs, each_step=each_step)
        assert (rig.state["preemptions"].get("memory", 0) > 0) == (blocks == 24)
        return found

    assert decisions(refined=True) == decisions(refined=False)


def test_a_predictor_that_was_further_off_than_the_history_is_no_longer_believed(one_seat: dict[str, Any]) -> None:
    rig = Rig(options={**one_seat, "prediction": {"sources": ["retrieval", "history"]}})
    taken = []
    for number in range(70):
        rig.add(f"r{number}", length=6)
        taken.append(rig.scheduler.update_predictions([[f"r{number}", nine(200, 300), "retrieval"]]))
        rig.drain()
    assert taken[:50] == [1] * 50, "nothing is known of it yet"
    assert taken[-10:] == [0] * 10
    for number in range(70, 700):
        rig.add(f"r{number}", length=6 + 30 * (number % 2))
        taken.append(rig.scheduler.update_predictions([[f"r{number}", nine(6 + 30 * (number % 2), 40), "retrieval"]]))
        rig.drain()
    assert taken[-1] == 1, "it was judged all the while, and has learned"
