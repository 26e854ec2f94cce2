"""The routing benchmark: searches of few runs, conversations of all ages, paired ratios, goals that can be missed."""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_ext.experiments.runner import RunFailed
from vllm_ext.routing.fleet import Ask, Fleet
from vllm_ext.simulation.cluster import SimulatedCluster, simulate_cluster
from vllm_ext.simulation.measure.run_data import GapHistogram, RequestRow, RequestTable, RunData, TimeSeries
from vllm_ext.simulation.spec import SimulationSpec, checked, parse, resolve
from vllm_ext.simulation.sweep.store import Outcome
from vllm_ext.simulation.workloads.requests import all_requests


@pytest.fixture
def routing() -> ModuleType:
    return importlib.import_module("routing")


@pytest.fixture
def capacity() -> ModuleType:
    return importlib.import_module("capacity")


@pytest.fixture
def conversations() -> ModuleType:
    return importlib.import_module("conversations")


@pytest.fixture
def runs() -> ModuleType:
    return importlib.import_module("cluster_runs")


# --- capacities -----------------------------------------------------------------------------------------------------


def searched(capacity: ModuleType, crosses_at: float, guess: float = 10.0) -> tuple[Any, list[float]]:
    """Search where a latency grows with the sixth power of the rate, and is 50 at ``crosses_at``."""
    rates: list[float] = []
    plan = capacity.search(lambda rate: rate, "p90", 50.0, guess)
    outcome = None
    while True:
        try:
            rates.append(plan.send(outcome))
        except StopIteration as stop:
            return stop.value, rates
        outcome = Outcome(metrics={"p90": 50 * (rates[-1] / crosses_at) ** 6, "rate": rates[-1]})


@pytest.mark.parametrize(("crosses_at", "most"), [(9.6, 2), (10.4, 3), (7.0, 6), (15.0, 6)])
def test_a_capacity_is_interpolated_between_neighbours(capacity: ModuleType, crosses_at: float, most: int) -> None:
    found, rates = searched(capacity, crosses_at)
    assert found.rate_per_s == pytest.approx(crosses_at)
    assert found.bounded
    assert found.runs == len(rates) == len(set(rates)) <= most
    assert found.fixed["rate"] == pytest.approx(9.0), "0.9 of the guess is always tried"


def test_who_never_meets_the_limit_has_the_lowest_rate_and_says_so(capacity: ModuleType) -> None:
    found, rates = searched(capacity, 0.01)
    assert not found.bounded
    assert found.rate_per_s == pytest.approx(min(rates))
    assert min(rates) < 2.5


def test_a_run_that_failed_ends_the_search(capacity: ModuleType) -> None:
    plan = capacity.search(lambda rate: rate, "p90", 50.0, 1.0)
    next(plan)
    with pytest.raises(RunFailed, match="no memory; the same command goes on"):
        plan.send(Outcome(error="no memory"))


# --- what is served -------------------------------------------------------------------------------------------------


def test_kinds_of_one_seed_are_drawn_alike_whatever_the_rate(conversations: ModuleType) -> None:
    shares = {"chat": 0.5, "document": 0.5}
    fast, slow = (
        conversations.Conversations(lambda: conversations.drawn(shares, 7), rate_per_s=rate, seed=7, ends_s=40.0)
        for rate in (4.0, 2.0)
    )
    numbers = [
        {request.meta["number"]: request.output_tokens for request in workload.start() if request.arrival_s > 0}
        for workload in (fast, slow)
    ]
    both = numbers[0].keys() & numbers[1].keys()
    assert numbers[0] != numbers[1]
    assert all(numbers[0][number] == numbers[1][number] for number in both if number > 1300)
    assert [one.arrival_s for one in fast.start()] == sorted(one.arrival_s for one in fast.start())
    lengths = {one.prompt_tokens > 3000 for one in fast.start()}
    assert lengths == {True, False}, "both kinds"


def test_a_conversation_that_had_begun_goes_on_with_its_history(conversations: ModuleType) -> None:
    turn, token_s = conversations.Turn, conversations.TOKEN_S
    turns = (turn(100, 50), turn(10, 20, 5.0), turn(30, 40, 8.0))
    assert conversations.going_on(turns, 0.0) == (0.0, turns)
    comes_s, left = conversations.going_on(turns, 1.0)
    assert comes_s == pytest.approx(50 * token_s + 5.0 - 1.0)
    assert left == (turn(160, 20, 5.0), turns[2])
    assert conversations.going_on(turns, 100.0) is None


def test_turns_follow_each_other_until_the_context_is_full(conversations: ModuleType) -> None:
    turn = conversations.Turn
    turns = (turn(20_000, 10), turn(5, 7, 2.0), turn(12_000, 800, 2.0))
    workload = conversations.Conversations(lambda: itertools.repeat(turns), rate_per_s=1.0, seed=0, ends_s=3.0)
    fresh = [one for one in all_requests(workload) if one.meta["turns"] == turns]
    assert {one.meta["place"] for one in fresh} == {0, 1}
    first, second = (next(one for one in fresh if one.meta["place"] == place) for place in (0, 1))
    assert second.prompt_tokens == 20_000 + 10 + 5
    assert second.token_ids[:20_000] == first.token_ids
    assert second.session_id == first.session_id


def test_a_file_has_two_halves_that_have_nothing_in_common(conversations: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "multi_turn" / "sharegpt.jsonl.gz"
    file.parent.mkdir()
    turns = [[{"from": "human", "value": "x" * 4 * n}, {"from": "gpt", "value": "y" * 40}] for n in range(1, 41)]
    with gzip.open(file, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps({"id": str(n), "conversations": one}) + "\n" for n, one in enumerate(turns))
    halves = [conversations.recorded(file, "chat", held_out=held_out) for held_out in (False, True)]
    lengths = [{turns[0].new_tokens for turns in half} for half in halves]
    assert lengths[0] | lengths[1] == set(range(1, 41))
    assert not lengths[0] & lengths[1]
    assert min(map(len, lengths)) > 10
    assert halves[0] == conversations.recorded(file, "chat", held_out=False)


def test_coding_sessions_are_made_smaller(conversations: ModuleType, tmp_path: Path) -> None:
    requests = [
        {"in": 8000, "out": 20, "think_time": 0.0},
        {"type": "subagent", "requests": []},
        {"in": 8800, "out": 40, "think_time": 16.0},
    ]
    file = tmp_path / "sessions.jsonl.gz"
    with gzip.open(file, "wt", encoding="utf-8") as lines:
        lines.write("".join(json.dumps({"requests": some}) + "\n" for some in (requests, requests[:1])))
    read = [*conversations.FILES["coding"][1](file)]
    assert read == [((1000, 10, 0.0), (90, 20, 4.0)), None], "what a turn adds is beside the answer before"


# --- rows and metrics -----------------------------------------------------------------------------------------------


class _Home:
    def choose(self, _ask: Ask, fleet: Fleet, _now: float) -> str:
        return max(fleet.replicas, key=lambda name: len(fleet.replicas[name].sent))


def fleet_of(*names: str) -> Fleet:
    fleet = Fleet()
    fleet.consist_of(names)
    return fleet


def test_the_same_router_again_begins_elsewhere(runs: ModuleType) -> None:
    router, fleet = runs.Shaken(_Home(), left=20), fleet_of("a", "b", "c")
    fleet.sent("b", Ask(5), 0.0)
    assert {router.choose(Ask(5), fleet, 0.0) for _ in range(20)} == {"a", "b", "c"}
    assert {router.choose(Ask(5), fleet, 0.0) for _ in range(20)} == {"b"}


def test_what_was_sent_can_be_forgotten(runs: ModuleType) -> None:
    fleet = fleet_of("a", "b")
    fleet.sent("b", Ask(5), 0.0)
    assert _Home().choose(Ask(5), fleet, 0.0) == "b"
    assert runs.Uncounted(_Home()).choose(Ask(5), fleet, 0.0) == "a"


def table_of(*rows: Mapping[str, Any]) -> RequestTable:
    table = RequestTable()
    for row in rows:
        table.append(RequestRow(**row), None)
    return table


def test_who_is_not_done_goes_on_at_its_pace(runs: ModuleType) -> None:
    run = RunData(
        label="", gaps=GapHistogram(), series=TimeSeries(), counters={}, duration_s=100.0, wall_s=0.0,
        requests=table_of(
            {"arrival_s": 10.0, "first_token_s": 11.0, "finish_s": 12.0, "true_output_tokens": 1, "output_tokens": 1},
            {"arrival_s": 40.0, "first_token_s": 41.0, "finish_s": 45.0, "true_output_tokens": 50, "output_tokens": 50},
        ),
        unserved=table_of(
            {"arrival_s": 80.0, "first_token_s": 90.0, "true_output_tokens": 40, "output_tokens": 10},
        ),
    )  # fmt: skip
    found = runs.latencies(run, 100.0, (0.3, 0.9))
    assert (found["requests"], found["finished_fraction"]) == (2.0, 0.5), "the first came too early"
    assert found["e2e_mean_ms"] == pytest.approx(1e3 * (5.0 + 10.0 + 40.0) / 2)
    assert found["ttft_p50_ms"] == pytest.approx(1e3 * 5.5)


def found(capacity: ModuleType, rate: float, e2e: float = 10.0, ttft: float = 5.0) -> Any:
    fixed = dict.fromkeys(("normalised_latency_p90_ms_per_token", "e2e_p99_ms"), 1.0)
    return capacity.Found(rate, True, {**fixed, "e2e_mean_ms": e2e, "ttft_p99_ms": ttft, "moved_fraction": 0.1}, 3)


def test_ratios_are_paired_by_seed_and_goals_can_be_missed(routing: ModuleType, capacity: ModuleType) -> None:
    """Seeds differ by a factor of 4, rows by 1.2 with each."""
    cells = {
        ("mixed sizes", "home"): {0: found(capacity, 10.0, e2e=13.0), 1: found(capacity, 40.0, e2e=13.0)},
        ("mixed sizes", "marginal"): {0: found(capacity, 12.0), 1: found(capacity, 48.0)},
        ("mixed sizes", "Ray's prefix"): {0: found(capacity, 11.0), 1: found(capacity, 44.0)},
        ("mixed sizes", "marginal again"): {0: found(capacity, 13.0), 1: found(capacity, 48.0)},
    }
    compared = routing.Compared(cells)
    ratio = compared.ratio("mixed sizes", "marginal", "home")
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.2, 1.2, 1.2))
    assert compared.best("mixed sizes") == "marginal", "the same router again is no row"
    assert compared.same("mixed sizes") == pytest.approx(13 / 12)
    judged = {one.name.partition(": ")[2]: one for one in routing.claims(compared)}
    assert judged["capacity, marginal over Ray's prefix"].value == pytest.approx(12 / 11, abs=1e-4)
    assert not judged["capacity, marginal over Ray's prefix"].met
    assert judged["capacity, marginal over the best row"].met
    assert judged["mean e2e at 0.9, home over marginal"].value == pytest.approx(1.3)
    assert judged["P99 TTFT at 0.9, marginal over home"].met
    assert len(judged) == 4, "round-robin and old reports were not run"


def test_the_whole_command_writes_a_result(
    routing: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows carry 2.0, round-robin 1.4; a second command runs nothing."""
    asked: list[tuple[str, float]] = []

    def measured(point: Any) -> dict[str, float]:
        asked.append((point.row, point.rate_per_s))
        over = point.rate_per_s / (1.4 if point.row == "round-robin" else 2.0)
        fixed = {"e2e_mean_ms": 10.0, "e2e_p99_ms": 20.0, "ttft_p99_ms": 5.0, "moved_fraction": 0.0}
        return {routing.NORMALISED: 120.0 * over**6, **fixed}

    monkeypatch.setattr(routing, "measured", measured)
    out = tmp_path / "routing.json"
    argv = ["--quick", "--jobs", "1", "--cache", str(tmp_path / "cache"), "--out", str(out)]
    routing.main(argv)
    first = len(asked)
    routing.main(argv)
    assert len(asked) == first < 14
    made = json.loads(out.read_text(encoding="utf-8"))
    assert made["metrics"]["agents + tier.capacity_conversations_per_s"] == pytest.approx(2.0, rel=1e-3)
    assert made["baselines"]["round-robin"]["agents + tier.capacity_conversations_per_s"] == pytest.approx(
        1.4, rel=1e-3
    )
    over = next(one for one in made["claims"] if "over round-robin" in one["name"])
    assert over["met"]
    assert math.isclose(over["value"], 2 / 1.4, rel_tol=1e-3)
    assert "agents + tier" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--held-out"], ["--scenes", "night"], ["--rows", "home; best"]])
def test_what_is_not_there_is_refused(routing: ModuleType, argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        routing.parsed(argv)


# --- a slower replica, and a workload of one's own ------------------------------------------------------------------


def test_a_slow_replica_takes_longer_and_its_reports_say_so(conversations: ModuleType) -> None:
    engine = {"system": "fcfs", "max_model_len": 4096, "profiled": True}
    spec = checked(parse(SimulationSpec, {"engine": engine}))
    turns = (conversations.Turn(100, 30), conversations.Turn(20, 30, 1.0))
    workload = conversations.Conversations(lambda: itertools.repeat(turns), rate_per_s=2.0, seed=1, ends_s=10.0)
    run = simulate_cluster(spec, replicas=2, router="round-robin", slow=2.0, workload=workload)
    slow_s, usual_s = (float((one.requests.column("e2e_s")).mean()) for one in run.replicas)
    assert slow_s > 1.7 * usual_s
    cluster = SimulatedCluster(
        resolve(spec), replicas=3, router=importlib.import_module("rivals").PowerOfTwo(), slow=2.0, workload=workload
    )
    cluster.run()
    told = [one.report.prices for one in cluster.fleet.replicas.values() if one.report is not None]
    assert told[0].base_s == pytest.approx(2 * told[1].base_s, rel=0.2)
    assert told[0].decode_s > 1.5 * told[1].decode_s
    with pytest.raises(ValueError, match=r"slow=0\.5: must be a factor of at least 1"):
        simulate_cluster(spec, replicas=2, router="least", slow=0.5)
