"""True lengths are read by oracle systems only: changed behind anybody else's back, no decision changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.distributions import nine
from tests.support.engine_loop import EngineLoop
from tests.support.fake_runner import FakeRunner
from vllm_ext.prediction.oracle import true_output_tokens
from vllm_ext.simulation.engine.events import VirtualClock
from vllm_ext.simulation.engine.harness import block_hasher, make_request, make_scheduler

STEERED = "vllm_ext.scheduling.scheduler.SteeredScheduler"

pytestmark = pytest.mark.usefixtures("quiet_vllm")


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (None, None),
        ({}, None),
        ({"osl": 5}, None),
        ({"bench_output_len": 5}, 5),
        ({"bench_output_len": 0}, None),
        ({"bench_output_len": -1}, None),
        ({"bench_output_len": True}, None),
        ({"bench_output_len": "5"}, None),
        ({"bench_output_len": 5.0}, None),
    ],
)
def test_only_a_positive_whole_number_is_a_length(extra: dict[str, Any] | None, expected: int | None) -> None:
    assert true_output_tokens(extra) == expected


def _run(system: str, told: dict[str, int | None], *, max_tokens: int = 60) -> tuple[bytes, list[dict[str, Any]]]:
    """Serve the same requests with the same true lengths; ``told`` is what ``bench_output_len`` says."""
    clock = VirtualClock()
    options = {"system": system, "allow_oracle": system.startswith("oracle")}
    scheduler: Any = make_scheduler(STEERED, max_num_seqs=3, additional_config={"vllm_ext": options})
    scheduler.clock = clock
    rng = random.Random(3)
    lengths = {f"r{i}": rng.choice((2, 10, 50)) for i in range(20)}
    loop = EngineLoop(scheduler, FakeRunner(output_lengths=lengths), on_schedule=lambda output: clock.advance(0.01))
    for number, req_id in enumerate(lengths):
        extra = {} if told.get(req_id) is None else {"bench_output_len": told[req_id]}
        if number % 4 == 0:
            extra["osl"] = lengths[req_id]
        loop.add(make_request(req_id, 10 + number, max_tokens=max_tokens, extra_args=extra, hasher=block_hasher()))
        loop.step()
    loop.run_until_idle()
    records = scheduler.vllm_ext_state(0)["records"]
    return loop.decision_log(), records


@pytest.mark.parametrize("system", ["fcfs", "alise"])
def test_without_an_oracle_the_hidden_length_changes_nothing(system: str) -> None:
    untold = _run(system, {})
    assert _run(system, {f"r{i}": i % 7 + 1 for i in range(20)}) == untold
    assert _run(system, {f"r{i}": 10**9 for i in range(20)}) == untold
    assert {r["prediction_source"] for r in untold[1]} <= {"hint", "history", "prior"}


@pytest.mark.parametrize("system", ["fcfs", "alise"])
def test_invariant_1_true_lengths_changed_after_admission_change_no_decision(system: str) -> None:
    """Twelve requests are in, none has ended; from then on they end elsewhere, and say so where oracles look.

    Until the first of them ends, in either run, every step is the same, and so is every prediction.
    """

    def run(lengths: dict[str, int]) -> tuple[list[Any], dict[str, Any]]:
        clock = VirtualClock()
        options = {"system": system}
        scheduler: Any = make_scheduler(STEERED, max_num_seqs=4, additional_config={"vllm_ext": options})
        scheduler.clock = clock
        true_lengths = {f"r{i}": 100 for i in range(12)}
        requests = {
            r: make_request(r, 10, max_tokens=200, extra_args={"bench_output_len": 100}, hasher=block_hasher())
            for r in true_lengths
        }
        loop = EngineLoop(scheduler, FakeRunner(output_lengths=true_lengths), on_schedule=lambda _: clock.advance(0.01))
        for request in requests.values():
            loop.add(request)
            loop.step()
        for req_id, length in lengths.items():
            true_lengths[req_id] = length
            requests[req_id].sampling_params.extra_args["bench_output_len"] = length
        scheduler.update_predictions([["r7", nine(3, 5), "retrieval"], ["r2", nine(180, 190), "retrieval"]])
        decisions = [loop.step() for _ in range(40)]
        assert len(scheduler.requests) == 12, "none has ended"
        jobs = {
            r: (job.prediction.source, job.prediction.distribution.quantiles(), job.estimate, job.demotions)
            for r, job in scheduler.tracked.by_id.items()
        }
        return decisions, jobs

    untouched = run({})
    assert run({f"r{i}": 60 + 7 * i for i in range(12)}) == untouched
    assert run({f"r{i}": 199 - 7 * i for i in range(12)}) == untouched


def test_an_oracle_follows_the_hidden_length() -> None:
    short_first = _run("oracle-alise", {f"r{i}": i + 1 for i in range(20)})
    long_first = _run("oracle-alise", {f"r{i}": 20 - i for i in range(20)})
    assert short_first[0] != long_first[0]
    assert {r["prediction_source"] for r in short_first[1]} == {"oracle"}
    assert {r["req_id"]: r["predicted_tokens"] for r in short_first[1]} == {f"r{i}": i + 1 for i in range(20)}


def test_an_oracle_knows_the_bound_too() -> None:
    _, records = _run("oracle-alise", {f"r{i}": 500 for i in range(20)})
    assert {r["predicted_tokens"] for r in records} == {60}


def test_requests_without_a_hidden_length_fall_back_to_the_other_sources() -> None:
    _, records = _run("oracle-alise", {"r1": 5})
    assert {r["prediction_source"] for r in records if r["req_id"] != "r1"} <= {"hint", "history", "prior"}


def test_no_other_module_names_the_hidden_length() -> None:
    """Invariant 1: policies and predictors have no way to it; the benchmark's own patch and tools do."""
    import vllm_ext

    root = Path(vllm_ext.__file__).parent
    readers = {"prediction/oracle.py"}
    for folder in ("contract", "prediction", "predictor", "scheduling", "systems"):
        for path in (root / folder).rglob("*.py"):
            name = path.relative_to(root).as_posix()
            assert name in readers or "bench_" not in path.read_text(), name
