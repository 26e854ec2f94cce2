"""What is claimed of servers that were tuned, from made-up runs."""

from __future__ import annotations

import gzip
import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_ext.experiments.grid import Grid
from vllm_ext.simulation.plan.candidates import DEFAULT, Candidate
from vllm_ext.simulation.spec import resolve

from .conftest import BENCHMARKS

PAPER, MODERN = "sharegpt, opt-13b, a100-40", "sharegpt, llama-3.1-8b, 1 x h100"


@pytest.fixture
def tuning(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "simulated"))
    return importlib.import_module("tuning")


def servers(tuning: ModuleType) -> Any:
    names = (
        tuning.AGAIN,
        tuning.TUNED,
        tuning.ALISE,
        tuning.ALISE_TUNED,
        tuning.OURS,
        tuning.SAME_FLAGS,
        tuning.TAIL,
        tuning.ORACLE,
    )
    return tuning.Servers(4.0, {tuning.VLLM: DEFAULT, **{name: Candidate(tokens=256) for name in names}})


def grid(tuning: ModuleType, ours: dict[str, float]) -> Grid:
    """Three seeds; vLLM takes 100 ms, tuned 80 ms, and what is ours what is said, by cell."""
    cells = {}
    for name in (PAPER, MODERN):
        for server in servers(tuning).by_name:
            mean = {tuning.VLLM: 100.0, tuning.AGAIN: 101.0, tuning.OURS: ours[name]}.get(server, 80.0)
            metrics = {tuning.MEAN: mean, tuning.P99: 3 * mean, tuning.TTFT_P90: mean, tuning.NORMALISED: mean}
            runs = [{**{k: v * (1 + 0.01 * s) for k, v in metrics.items()}, "on_time_fraction": 0.5} for s in range(3)]
            cells[f"{name} at 0.9", server] = runs
    return Grid(cells)


def test_goals_are_of_the_papers_cells_and_of_the_modern_ones_apart(tuning: ModuleType) -> None:
    found = {
        one.name: one for one in tuning.claims(grid(tuning, {PAPER: 50.0, MODERN: 160.0}), [PAPER, MODERN], (0.9,))
    }
    values = {name: one.value for name, one in found.items()}
    assert values["ours tuned over vLLM at 0.9, papers' models on A100: mean e2e, geometric mean"] == 2.0
    assert values["ours tuned over vLLM at 0.9, 8B and 70B on H100: mean e2e, geometric mean"] == 0.625
    worst = f"ours tuned over vLLM tuned at 0.9: mean e2e, worst cell ({MODERN})"
    assert (values[worst], found[worst].met) == (0.5, False)
    assert not any(" at 1:" in name for name in found), "that load was not run"


def test_a_row_says_how_many_times_better_with_the_seeds_interval(tuning: ModuleType) -> None:
    made = grid(tuning, {PAPER: 50.0, MODERN: 80.0})
    papers, modern = tuning.tables(made, [PAPER, MODERN], dict.fromkeys((PAPER, MODERN), servers(tuning)), (0.9,))
    assert (papers.title, modern.title) == ("papers' models on A100", "8B and 70B on H100")
    rows = {row[1]: row for row in papers.rows}
    assert rows[tuning.OURS] == [
        f"{PAPER}; 1 is 4/s",
        tuning.OURS,
        "vLLM, 256 tokens",
        "2.00 (2.00..2.00) / 2.00 / 2.00 / +0",
    ]
    assert {row[1]: row[3].split()[0] for row in modern.rows}[tuning.OURS] == "1.25"
    assert tuning.VLLM not in rows, "all are over it"


def test_the_last_rows_are_geometric_means_over_the_cells(tuning: ModuleType) -> None:
    other = PAPER.replace("sharegpt", "wildchat")
    made = Grid({(at.replace(MODERN, other), server): runs
                 for (at, server), runs in grid(tuning, {PAPER: 50.0, MODERN: 200.0}).cells.items()})  # fmt: skip
    (found,) = tuning.tables(made, [PAPER, other], dict.fromkeys((PAPER, other), servers(tuning)), (0.9,))
    means = {row[1]: row[3] for row in found.rows if row[0] == "geometric mean"}
    assert means[tuning.OURS] == "1.00 / 1.00 / 1.00", "2 and a half"
    assert means[tuning.TUNED] == "1.25 / 1.25 / 1.25"


@pytest.mark.parametrize("name", [PAPER, MODERN])
def test_vllm_as_it_comes_has_the_defaults_of_the_device(tuning: ModuleType, name: str, tmp_path: Path) -> None:
    data = tmp_path / "multi_turn"
    data.mkdir()
    (data / "sharegpt.jsonl.gz").write_bytes(b"")
    limits = resolve(tuning.CELLS[name].base(tmp_path, 0)).limits
    assert (limits.max_num_batched_tokens, limits.max_num_seqs) == ((8192, 1024) if name == MODERN else (2048, 256))


def test_lengths_reach_the_scheduler_as_said(tuning: ModuleType, tmp_path: Path) -> None:
    files = (tmp_path / "own.jsonl", tmp_path / "others.jsonl")
    for file in files:
        file.write_text('{"prompt_tokens": 5, "output_tokens": 3, "output_quantiles": [1, 1, 2, 3, 3, 3, 4, 5, 6]}\n')
    found = servers(tuning)
    made = {
        who: tuning.spec_of_lengths(tuning.CELLS[PAPER], files, found, who, 1.0, 100, 7)
        for who in (tuning.HISTORY, tuning.PREDICTED, tuning.ANOTHERS, tuning.TRUE, tuning.FIRST_TOKENS)
    }
    assert {who: spec.workload.announce for who, spec in made.items()} == {
        tuning.HISTORY: "none", tuning.PREDICTED: "predicted", tuning.ANOTHERS: "predicted", tuning.TRUE: "hidden",
        tuning.FIRST_TOKENS: "none",
    }  # fmt: skip
    assert made[tuning.ANOTHERS].workload.source == str(files[1])
    assert made[tuning.TRUE].engine.system == "oracle-alise"
    assert made[tuning.FIRST_TOKENS].engine.options["kv_tier"] == {"gib": 64.0}
    assert {spec.workload.rate_per_s for spec in made.values()} == {4.0}
    assert {spec.engine.max_num_batched_tokens for spec in made.values()} == {256}


def test_made_up_conversations_are_served_and_the_result_has_what_pages_show(
    tuning: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By servers that need no search, on a few requests."""
    monkeypatch.setenv("VLLM_EXT_CACHE", str(tmp_path / "cache"))
    file = tmp_path / tuning.CELLS[PAPER].files[0]
    file.parent.mkdir()
    turns = [[{"from": "human", "value": "why " * (5 + 7 * i)}, {"from": "gpt", "value": "so " * 40}] for i in range(9)]
    with gzip.open(file, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps({"conversations": one}) + "\n" for one in turns)
    alise = replace(DEFAULT, system=tuning._ALISE)
    found = servers(tuning).by_name | {tuning.OURS: alise, tuning.ORACLE: replace(DEFAULT, system=tuning._ORACLE)}
    monkeypatch.setattr(tuning, "found_by_search", lambda *_: tuning.Servers(4.0, found))
    monkeypatch.setattr(tuning, "QUICK_REQUESTS", 20)
    kept = tmp_path / "tuning.json"
    tuning.main(["--data", str(tmp_path), "--quick", "--jobs", "1", "--out", str(kept)])
    result = json.loads(kept.read_text())
    header, *rows = result["config"]["tables"]["papers' models on A100"]
    assert header == ["cell", "server", "what it is", "at 0.9"]
    assert [row[1] for row in rows] == [*found][1:]
    assert result["metrics"][f"{PAPER} at 0.9.{tuning.MEAN}"] > 0
    assert set(result["baselines"]) == {*found} - {tuning.OURS}
