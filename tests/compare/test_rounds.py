"""Which run comes next, what is kept of it, and when it is enough."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.paper_servers import SERVICE_S, Paper
from vllm_ext.compare import rounds
from vllm_ext.compare.rounds import Asked, Cells, Found, NoAnswer, compare
from vllm_ext.compare.servers import Row
from vllm_ext.simulation.workloads.spec import WorkloadSpec

ROWS = (Row("upstream"), Row("upstream, again"), Row("alise", ("--scheduler-cls", "alise")))
WORKLOAD = WorkloadSpec(source="fixed:20:8", num_requests=100)


REPEATS = 4


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "MOST_REPEATS", REPEATS)


def asked(**changes: object) -> Asked:
    made = Asked(baseline=ROWS[0], twin=ROWS[1], others=ROWS[2:], workload=WORKLOAD, loads=(0.9,), requests=100,
                 precision=0.3, budget_s=1e9)  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def run(backend: Paper, folder: Path, wanted: Asked, now: object = None) -> Found:
    found = Found()
    clock = {} if now is None else {"now": now}
    compare(backend, Cells(folder, "of"), wanted, lambda _: None, found, **clock)  # type: ignore[arg-type]
    return found


def test_load_1_is_what_the_baseline_ends_per_second_of_a_backlog(tmp_path: Path) -> None:
    assert run(Paper(noise=0.0), tmp_path, asked()).rate_per_s == pytest.approx(1 / SERVICE_S)


def test_load_1_of_conversations_is_how_many_of_them_it_ends(tmp_path: Path) -> None:
    talks = WorkloadSpec(source="pensieve-sharegpt", scale_prompt=0.1, scale_output=0.1, num_requests=40, think_s=30.0)
    backend = Paper(noise=0.0)
    found = run(backend, tmp_path, asked(workload=talks, requests=40))
    turns = len(found.offered[0.9, 0])
    assert turns > 100
    assert found.rate_per_s == pytest.approx(1 / SERVICE_S * 40 / turns)
    assert len(found.runs["alise", 0.9][0].e2e_s) == turns
    backlog, *others = (one for _, one in backend.served)
    assert (backlog.arrivals, backlog.think_s) == ("at-once", 0.0)
    assert {one.think_s for one in others if one.num_requests == 40} == {30.0}
    warm = {one.num_requests for one in others if one.think_s == 0}
    assert max(warm) < 20, "some 60 requests, of conversations that do not think"


def test_all_serve_the_same_requests_of_a_repeat_and_others_in_the_next(tmp_path: Path) -> None:
    backend = Paper()
    run(backend, tmp_path, asked(precision=1e-9, budget_s=1e9))
    by_seed: dict[int, set[str]] = {}
    for name, workload in backend.served:
        if workload.num_requests == 100 and workload.arrivals == "poisson":
            by_seed.setdefault(workload.seed, set()).add(name)
    assert len(by_seed) == REPEATS
    assert all(names == {row.name for row in ROWS} for names in by_seed.values())


def test_the_order_rotates(tmp_path: Path) -> None:
    backend = Paper()
    run(backend, tmp_path, asked(precision=1e-9))
    assert backend.starts[:9] == [
        "upstream", "upstream, again", "alise", "upstream, again", "alise", "upstream", "alise", "upstream",
        "upstream, again",
    ]  # fmt: skip


def test_a_comparison_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    first = Paper()
    whole = run(first, tmp_path / "a", asked(precision=0.02))
    again = Paper()
    assert run(again, tmp_path / "a", asked(precision=0.02)).stopped == whole.stopped
    assert again.starts == []
    next(iter((tmp_path / "a").glob("alise-*.json"))).write_text("{")
    run(again, tmp_path / "a", asked(precision=0.02))
    assert again.starts == ["alise"], "a damaged file is run again, and nothing else"


def test_it_stops_when_the_interval_is_narrow_enough(tmp_path: Path) -> None:
    wide = run(Paper(), tmp_path / "a", asked(precision=0.5))
    narrow = run(Paper(), tmp_path / "b", asked(precision=0.03))
    assert "within 50 %" in wide.stopped
    repeats = [len(found.runs["alise", 0.9]) for found in (wide, narrow)]
    assert repeats[0] < repeats[1]


def test_no_run_begins_after_the_time_is_over(tmp_path: Path) -> None:
    ticks = iter(range(1000))
    found = run(Paper(), tmp_path, asked(precision=1e-9, budget_s=6.5), now=lambda: float(next(ticks)))
    assert found.stopped == "the time was over after 1 repeats"
    assert len(found.runs["upstream", 0.9]) == 1


@pytest.mark.parametrize(
    ("ran", "failed", "left"),
    [
        ((1, 2, 2), "", (1, 1, 1)),
        ((1, 2, 0), "", (1, 2, 0)),
        ((2, 2, 1), "alise", (2, 2, 1)),
        ((3, 3, 2), "", (2, 2, 2)),
    ],
)
def test_a_repeat_that_some_servers_lack_does_not_count(
    tmp_path: Path, ran: tuple[int, ...], failed: str, left: tuple[int, ...]
) -> None:
    found = run(Paper(), tmp_path, asked(precision=1e-9))
    for row, count in zip(ROWS, ran, strict=True):
        for repeat in range(count, REPEATS):
            del found.runs[row.name, 0.9][repeat], found.beside[row.name, 0.9][repeat]
    found.failed = {failed: "it ended"} if failed else {}
    whole = found.whole_repeats(asked())
    assert tuple(len(whole.runs.get((row.name, 0.9), ())) for row in ROWS) == left
    assert whole.beside == {key: {at: found.beside[key][at] for at in runs} for key, runs in whole.runs.items()}


def test_each_run_says_how_much_is_left(tmp_path: Path) -> None:
    """Runs that were kept say nothing of how long the others take."""
    lines: list[str] = []
    clock = iter(float(30 * at) for at in range(1000))
    wanted = asked(precision=1e-9, budget_s=1e6)
    compare(Paper(), Cells(tmp_path, "of"), wanted, lines.append, Found(), lambda: next(clock))
    told = [line.rpartition("(")[2].rstrip(")") for line in lines if line.startswith("repeat")]
    assert told[0].startswith("5 more runs at least, some ")
    assert told[4].startswith("1 more runs at least, some ")
    assert told[5].startswith("at most 16")
    again: list[str] = []
    compare(Paper(), Cells(tmp_path, "of"), wanted, again.append, Found(), lambda: 0.0)
    assert [line.rpartition("(")[2].rstrip(")") for line in again if line.startswith("repeat 1")] == [
        "5 more runs at least", "4 more runs at least", "3 more runs at least"
    ]  # fmt: skip


def test_a_server_that_dies_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    backend = Paper()
    backend.dies.add("alise")
    others = [ROWS[2], Row("sarathi", ("--scheduler-cls", "sarathi"))]
    found = run(backend, tmp_path, asked(others=others))
    assert found.failed == {"alise": "it ended\nits last lines"}
    assert backend.starts.count("alise") == 1
    assert found.runs["sarathi", 0.9]


def test_without_the_baseline_there_is_no_answer(tmp_path: Path) -> None:
    backend = Paper()
    backend.dies.add("upstream")
    with pytest.raises(NoAnswer, match="the baseline failed: it ended"):
        run(backend, tmp_path, asked())
    assert backend.up == 0


def test_a_repeat_takes_the_next_requests_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        "".join(f'{{"prompt_tokens": {n + 1}, "output_tokens": 4, "timestamp": {n}}}\n' for n in range(250))
    )
    backend = Paper()
    workload = WorkloadSpec(source=str(file), num_requests=100, arrivals="recorded", rate_per_s=1.0)
    run(backend, tmp_path / "cells", asked(workload=workload, precision=1e-9))
    skipped = [one.skip_requests for _, one in backend.served if one.arrivals == "recorded" and one.num_requests == 100]
    assert set(skipped) == {repeat * 100 % 151 for repeat in range(REPEATS)}


def test_the_best_flags_are_searched_on_requests_that_no_repeat_has(tmp_path: Path) -> None:
    """256 tokens are best, and a reserve makes it worse; a budget below the seats needs fewer of them."""
    best = ("--max-num-batched-tokens", "256", "--max-num-seqs", "256")
    backend = Paper({" ".join(best): 0.7})
    found = run(backend, tmp_path, asked(others=[Row("upstream-tuned", tune=True)], seats=512, precision=1e-9))
    assert found.flags == {"upstream-tuned": best}
    searched = {one.seed for flags, one in backend.told if "--max-num-batched-tokens 1024" in flags}
    repeated = {one.seed for flags, one in backend.told if not flags and one.num_requests == 100}
    (own,) = searched - {90_000}
    assert own not in repeated & {WORKLOAD.seed + repeat for repeat in range(REPEATS)}
    assert {WORKLOAD.seed + repeat for repeat in range(REPEATS)} <= repeated
    again = Paper()
    run(again, tmp_path, asked(others=[Row("upstream-tuned", tune=True)], seats=512, precision=1e-9))
    assert again.starts == []


def test_a_candidate_that_does_not_start_is_out(tmp_path: Path) -> None:
    backend = Paper()
    backend.dies.add("--max-num-batched-tokens 128 --max-num-seqs 128")
    found = run(backend, tmp_path, asked(others=[Row("upstream-tuned", tune=True)], seats=256))
    assert found.failed == {}
    assert "128" not in found.flags["upstream-tuned"]
