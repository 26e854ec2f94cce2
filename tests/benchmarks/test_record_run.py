"""The recorder of real runs, without engines: what it asks of them and sends them, and what is left of one."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.extent import HANG_S
from tests.support.simulation_parts import ListWorkload, ask
from vllm_ext.cli.command import Failed
from vllm_ext.demo.server import group_members
from vllm_ext.prediction.oracle import HIDDEN_LENGTH_KEY
from vllm_ext.simulation.workloads.requests import SimRequest

FOUND = {"requests": 8.0, "e2e_mean_ms": 5.0, "foreign_cpu_cores": 0.0, "saturated_per_s": 40.0}


@pytest.fixture
def script() -> ModuleType:
    return import_module("record_run")


@pytest.fixture
def asked(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is asked of engines, which answer `FOUND`."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(script, "_in_child", lambda _, what: found.append(json.loads(json.dumps(what))) or FOUND)
    return found


def rates(asked: list[dict[str, Any]]) -> list[float | None]:
    return [one["workload"]["rate_per_s"] for one in asked]


def test_loads_are_of_what_the_first_system_ends_of_a_backlog_and_repeats_are_alike(
    script: ModuleType, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    out = tmp_path / "run.jsonl"
    out.write_text("of before")
    options = ["--systems", "upstream-priority,alise", "--loads", "0.5,0.8", "--repeats", "2", "--num-requests", "8"]
    assert script.main([str(out), *options, "--model", "m", "--warm-up", "3", "--", "--max-num-seqs", "4"]) == 0
    backlog, *runs = asked
    assert (backlog["workload"]["arrivals"], backlog["workload"]["rate_per_s"]) == ("at-once", None)
    assert "out" not in backlog
    common = ["--model", "m", "--max-num-seqs", "4"]
    upstream, ours = [*common, "--scheduling-policy", "priority"], [*common, "--scheduler-cls", "alise"]
    assert [one["flags"] for one in asked] == [upstream, *[upstream, ours] * 4]
    assert rates(runs) == [20.0, 20.0, 32.0, 32.0] * 2
    assert {one["workload"]["num_requests"] for one in asked} == {11}
    assert {one["warm_up"] for one in runs} == {3}
    assert [one["which"]["repeat"] for one in runs] == [0] * 4 + [1] * 4
    assert [one["workload"] for one in runs[:4]] == [one["workload"] for one in runs[4:]]
    assert out.read_text() == "", "what was there is gone"


def test_a_given_rate_is_that_of_load_1_and_nothing_is_measured_first(
    script: ModuleType, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    given = [str(tmp_path / "run.jsonl.gz"), "--rate", "5", "--loads", "2", "--set", "system_prompt_tokens=7"]
    assert script.record(script.parser([]).parse_args(given)) == 5.0
    assert rates(asked) == [10.0]
    assert asked[0]["workload"]["system_prompt_tokens"] == 7
    assert asked[0]["flags"][0] == "--model", "the tiny one"


def test_a_workload_without_a_rate_is_served_as_it_is(
    script: ModuleType, asked: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run.jsonl")
    assert script.main([out, "--arrivals", "closed-loop", "--clients", "2"]) == 0
    assert rates(asked) == [None]
    assert script.main([out, "--arrivals", "closed-loop", "--loads", "0.5"]) == 2
    assert capsys.readouterr().err.endswith("record_run.py: --loads: needs --rate with arrivals='closed-loop'\n")
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--systems", "alise,nonsense"], "nonsense"),
        (["--set", "patience_s=1"], "abort_share, patience_s: must be left out"),
        (["--source", "nowhere.json"], "nowhere.json"),
        (["--loads", "0.5,0"], "0: must be a number above 0"),
        (["--num-requests", "0", "--warm-up", "0"], "no request arrives"),
        (["--set", "cvv=2"], "cvv"),
    ],
)
def test_what_is_wrong_is_told_in_a_line_before_an_engine_starts(
    script: ModuleType, asked: list[dict[str, Any]], tmp_path: Path, options: list[str], why: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "run.jsonl"
    try:
        status = script.main([str(out), *options])
    except SystemExit as ended:
        status = ended.code
    told = capsys.readouterr().err
    assert (status, asked, told.count("\n"), why in told) == (2, [], 1, True), told
    assert not out.exists()


class Echo:
    """An engine whose answers are as long as their hidden lengths; of ``cut`` a token is missing."""

    def __init__(self, cut: str = "") -> None:
        self._cut = cut
        self.got: list[tuple[str, Any, Any]] = []
        self.sessions: list[str | None] = []

    async def generate(self, prompt: Any, sampling: Any, req_id: str, priority: int, session_id: str | None) -> Any:
        self.got.append((req_id, prompt, sampling))
        self.sessions.append(session_id)
        for number in range(sampling.extra_args[HIDDEN_LENGTH_KEY] - (req_id == self._cut)):
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[number])], prompt_token_ids=[1, 2])


async def test_one_request_goes_first_and_the_next_turn_follows_on_the_answer(script: ModuleType) -> None:
    def next_turn(request: SimRequest, finished_s: float, output_ids: Sequence[int]) -> list[SimRequest]:
        turn = ask("c", arrival_s=0.02, output=2, session_id="s", token_ids=[*output_ids, 7], prompt=6)
        return [turn] if request.req_id == "b" else []

    workload = ListWorkload(
        [ask("a", output=3, extra_args={"osl": 4}), ask("b", arrival_s=0.01, output=9, max_tokens=5)], next_turn
    )
    engine = Echo()
    start_s, rows, _ = await script.serve(engine, workload)
    assert [req_id for req_id, *_ in engine.got] == ["first", "a", "b", "c"]
    assert [(row["req_id"], row["output_tokens"], len(row["token_times_s"])) for row in rows] == [
        ("a", 3, 3), ("b", 5, 5), ("c", 2, 2)
    ]  # fmt: skip
    assert all(row["arrival_s"] <= row["sent_s"] <= row["token_times_s"][0] for row in rows), "times count from there"
    assert start_s + rows[-1]["token_times_s"][-1] <= time.monotonic()
    assert engine.sessions[-1] == "s"
    assert engine.got[-1][1]["prompt_token_ids"][:5] == [0, 1, 2, 3, 4], "what was answered, which is found cached"
    _, prompt, sampling = engine.got[1]
    assert (len(prompt["prompt_token_ids"]), sampling.max_tokens, sampling.extra_args["osl"]) == (10, 64, 4)
    prompts = [tuple(prompt["prompt_token_ids"]) for _, prompt, _ in engine.got[:3]]
    assert all(one[:8] != other[:8] for one, other in itertools.combinations(prompts, 2)), "none is found cached"


async def test_an_answer_of_another_length_fails_the_run(script: ModuleType) -> None:
    with pytest.raises(ExceptionGroup) as failed:
        await script.serve(Echo(cut="b"), ListWorkload([ask("a"), ask("b")]))
    assert failed.value.exceptions[0].args == ("b: 2 tokens came, and 3 were to come",)


def engine_of(tmp_path: Path, code: str) -> str:
    file = tmp_path / "engine.py"
    file.write_text(code, encoding="utf-8")
    return str(file)


def test_a_failing_engine_is_told_with_its_run(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "__file__", engine_of(tmp_path, "raise SystemExit('no memory left')"))
    with pytest.raises(Failed, match="alise at load 1: the engine ended with status 1; see above"):
        script._in_child("alise at load 1", {})
    assert "no memory left" in capfd.readouterr().err


def test_all_of_an_engine_ends_with_the_recorder_that_is_told_to(script: ModuleType, tmp_path: Path) -> None:
    told = tmp_path / "group"
    core = f"import os, time; open({str(told)!r}, 'w').write(str(os.getpgrp())); time.sleep(600)"
    engine = engine_of(tmp_path, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {core!r}])")
    code = f"import record_run; record_run.__file__ = {engine!r}; record_run._in_child('x', {{}})"
    deadline = time.monotonic() + HANG_S
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(str(script.__file__)).parent) as recorder:
        while not (told.exists() and told.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        group = int(told.read_text())
        assert group_members(group)
        recorder.terminate()
        assert recorder.wait(HANG_S) == 128 + signal.SIGTERM
    while group_members(group) and time.monotonic() < deadline:
        time.sleep(0.05)  # a killed process ends when it is next scheduled
    assert group_members(group) == []
