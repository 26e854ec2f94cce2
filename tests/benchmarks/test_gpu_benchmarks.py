"""Benchmarks of engines on a GPU: what they make of what they measured, and a try of each on the CPU."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.extent import HANG_S
from vllm_ext.report.results import NEEDS_DEVICE
from vllm_ext.step_time import profile as profiles

from .conftest import GPU

ENGINES = ("gpu_right", "gpu_budget", "gpu_decode", "gpu_return", "gpu_talks")


def answers(*tokens: list[int], logprob: float | None = -1.0, **facts: Any) -> dict[str, Any]:
    return {
        "tokens": list(tokens), "logprobs": [[logprob] * len(one) for one in tokens], "unfinished": 0,
        "likely": [[[[token, -1.0], [token + 1, -1.1], [token + 2, -1.4]] for token in one] for one in tokens],
        "preemptions": 0, "loaded_bytes": 0, "state": {"attention": None, "fallbacks": 0}, "problems": [],
        "complete": True, **facts,
    }  # fmt: skip


def test_tokens_are_compared_up_to_the_first_that_differs() -> None:
    right = importlib.import_module("gpu_right")
    reference = answers([1, 2, 3, 4], [5, 6, 7, 8])
    found = right.compared(answers([1, 2, 9, 4], [5, 6, 7, 8], logprob=-1.25), reference)
    assert found == {
        "tokens_equal_share": 6 / 8, "largest_logprob_difference": 0.25, "logprobs_that_are_no_numbers": 0,
        "largest_difference_of_a_choice": pytest.approx(0.4),
    }  # fmt: skip
    close = right.compared(answers([1, 2, 4, 9], [5, 6, 7, 8]), reference)
    assert close["largest_difference_of_a_choice"] == pytest.approx(0.1), "what comes behind is another text"


FINE = answers(
    [1], tokens_equal_share=0.5, largest_logprob_difference=0.0, logprobs_that_are_no_numbers=0,
    largest_difference_of_a_choice=0.1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "facts", "said"),
    [
        ("own", {"largest_difference_of_a_choice": 0.2}, "a token's logprob is 0.200 below that of vLLM's choice"),
        ("own", {"largest_logprob_difference": 0.4}, "a logprob is off by 0.400"),
        ("own", {"logprobs_that_are_no_numbers": 3}, "3 logprobs are no numbers"),
        ("stock", {"unfinished": 2}, "2 requests never ended"),
        ("alise", {"state": {"fallbacks": 4}}, "4 steps fell back to FCFS"),
    ],
)
def test_what_is_wrong_with_an_engine_is_said(setting: str, facts: dict[str, Any], said: str) -> None:
    right = importlib.import_module("gpu_right")
    assert right.wrong(setting, {**FINE, **facts}) == [said]
    assert right.wrong(setting, FINE) == []


@pytest.mark.parametrize(
    ("setting", "facts", "said"),
    [
        ("tier-8", {"preemptions": 3}, "the tier was not tried"),
        ("own", {}, "our kernel served no step"),
        ("int8", {"state": {"attention": {"steps": {"own": 3}}, "kv_device": {"read_tokens": 0}}}, "no KV in 8 bits"),
    ],
)
def test_what_an_engine_did_not_try_is_said(setting: str, facts: dict[str, Any], said: str) -> None:
    right = importlib.import_module("gpu_right")
    assert any(said in one for one in right.untried(setting, {**FINE, **facts}))
    assert right.untried("stock", FINE) == []


def run_main(
    name: str, engines: dict[str, dict[str, Any]], out: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, dict[str, Any]]:
    """Run a benchmark over engines whose results are given; return its exit status and its result."""
    gpu_engine, module = importlib.import_module("gpu_engine"), importlib.import_module(name)

    def in_processes(_script: str, _args: Any, report: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        settings = report.found.setdefault("settings", {})
        for setting, found in engines.items():
            settings[setting] = json.loads(json.dumps(found))
            yield setting, settings[setting]

    monkeypatch.setattr(gpu_engine, "in_processes", in_processes)
    return module.main(["--dry", "--out", str(out)]), json.loads(out.read_text())


DIED: dict[str, Any] = {"problems": ["the engine failed"], "complete": False, "seconds": 1.0, "tail": "out of memory"}


@pytest.mark.parametrize(
    ("engines", "status", "wrong"),
    [
        ({"stock": answers([1, 2])}, 0, None),
        ({"stock": answers([1, 2]), "triton": answers([1, 9])}, 1, ["triton"]),
        ({"stock": answers([1, 2]), "triton": answers([1, 3])}, 0, None),
        ({"stock": answers([1, 2]), "triton": answers([1, 2], logprob=None)}, 1, ["triton"]),
        ({"stock": answers([1, 2]), "triton": DIED}, 3, None),
        ({"stock": DIED, "triton": answers([1, 2])}, 3, None),
        ({"stock": answers([1, 2]), "own": answers([1, 2])}, 3, None),
        ({"stock": answers([1, 2]), "triton": answers([7, 8]), "own": DIED}, 1, ["triton"]),
    ],
    ids=["fine", "other tokens", "nearly as likely", "NaN", "died", "no reference", "not tried", "wrong and died"],
)
def test_only_wrong_answers_are_called_wrong(
    engines: dict[str, Any], status: int, wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that failed, or did not try what it was started for, is something missing: 3."""
    ended, found = run_main("gpu_right", engines, tmp_path / "right.json", monkeypatch)
    assert ended == status
    assert found.get("wrong") == wrong
    assert found["complete"] == all(one["complete"] and not one["problems"] for one in found["settings"].values())


@pytest.mark.parametrize("name", ["gpu_decode", "gpu_return", "gpu_talks"])
def test_a_benchmark_whose_engine_failed_is_incomplete(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine = {"problems": [], "complete": True, "seconds": 1.0}
    first, second = importlib.import_module(name).SETTINGS[:2]
    ended, found = run_main(name, {first: fine, second: DIED}, tmp_path / "found.json", monkeypatch)
    assert (ended, found["complete"], "wrong" in found) == (3, False, False)
    ended, found = run_main(name, {first: fine, second: fine}, tmp_path / "found.json", monkeypatch)
    assert (ended, found["complete"]) == (0, True)


def test_conversations_say_that_int8_has_no_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fine = {"problems": [], "complete": True, "seconds": 1.0}
    _, found = run_main("gpu_talks", {"int8": fine}, tmp_path / "found.json", monkeypatch)
    assert found["details"].startswith("int8 runs eagerly")
    assert "Steps with KV in 8 bits run eagerly" in str(importlib.import_module("gpu_talks").__doc__)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("name", ENGINES)
def test_without_a_gpu_it_says_so(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(GPU / f"{name}.py"), "--out", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == NEEDS_DEVICE
    assert "needs a CUDA device" in done.stderr


@pytest.mark.full
@pytest.mark.e2e
@pytest.mark.parametrize("name", ENGINES)
def test_a_try_on_the_cpu_starts_its_engines_and_writes_its_result(name: str, tmp_path: Path) -> None:
    out = tmp_path / f"{name}.json"
    options = {
        "gpu_right": ["--settings", "stock,tier-16,tier-8,own,int8"],
        "gpu_budget": [
            "--profile", str(tmp_path / "profile.json"), "--window-s", "2", "--drain-s", "2", "--grid-s", str(HANG_S),
            "--total-s", str(HANG_S),
        ],
    }  # fmt: skip
    command = [
        sys.executable,
        str(GPU / f"{name}.py"),
        "--dry",
        "--out",
        str(out),
        *options.get(name, []),
    ]
    limits = [] if name == "gpu_budget" else ["--limit-s", str(HANG_S)]
    done = subprocess.run([*command, *limits], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["complete"] is True
    assert "wrong" not in found
    if name == "gpu_budget":
        assert set(found["windows"]) == {"128", "32"}
        assert found["grid_dropped"] == []
        assert profiles.load(tmp_path / "profile.json").num_steps == 5 * len(found["grid"])
    else:
        assert all(one["problems"] == [] for one in found["settings"].values())
