"""The length predictor beside a real engine: what it is asked, what comes of it, what its failures cost: nothing."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import offline_prediction
import psutil
import pytest
from engines import BASE_ENGINE, ENVIRONMENT
from forks import ForkServer, run
from predicting import (
    asked,
    begin_when,
    complete,
    complete_after,
    late_predictions,
    options,
    outcome,
    predictor_log,
    record_of,
    up,
    worker_pid,
)
from servers import HANG_S, HERE, MODEL, Served, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3 * HANG_S)]

TOKENS = 20
"""Output of requests of which it does not matter how long they are."""
MODULES = ("turnstile",)


@pytest.fixture(scope="module")
def served(forks: ForkServer | None, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose predictor does what prompts tell it to."""
    folder = tmp_path_factory.mktemp("prediction")
    log = folder / "requests.jsonl"
    args = [*options(folder / "predictor"), "--ext-request-log", str(log), "--max-num-seqs", "4"]
    server_log = folder / "server.log"
    with Served(llama, args, log_path=server_log, forks=forks, request_log=log, modules=MODULES) as server:
        complete(server, "wake up", 1)  # the predictor starts with the engine's first request
        wait_until(lambda: up(server), "the predictor ready")
        yield server


def test_a_prediction_reaches_the_scheduler_and_the_end_of_the_request_the_predictor(served: Served) -> None:
    text = "a question about the tides"
    assert complete_after(served, lambda: late_predictions(served), text, 301) == 301
    record = record_of(served, 301)
    assert (record["prediction_source"], record["predicted_tokens"]) == ("retrieval", 7)
    assert record["demotions"] > 0, "7 were predicted, 301 came"
    wait_until(lambda: {"finished": text, "tokens": 301} in predictor_log(served), "what came of it")


def test_what_the_predictor_is_asked_is_what_the_user_said(served: Served) -> None:
    system = "You are a patient tutor of geography. " * 10
    messages: list[Any] = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Name three rivers."},
        {"role": "assistant", "content": "The Rhine, the Nile and the Amazon."},
        {"role": "user", "content": [{"type": "text", "text": "Which is the longest?"}]},
    ]

    def ask(stream: bool) -> None:
        answer = served.client().chat.completions.create(
            model=MODEL, messages=messages, max_tokens=TOKENS, stream=stream
        )
        if stream:
            list(answer)

    def both_asked() -> bool:
        return sum("Which is the longest?" in text for text in asked(served)) == 2

    begin_when(served, both_asked, lambda: ask(stream=False), lambda: ask(stream=True))
    expected = [text for text in asked(served) if "Which is the longest?" in text]
    assert expected[0] == expected[1]
    assert "Name three rivers." in expected[0]
    assert "Amazon" not in expected[0]
    assert expected[0].startswith("You are a patient tutor")
    assert expected[0].count("patient tutor") < 5


def test_prompts_of_every_kind_are_asked_or_left_out(served: Served) -> None:
    """Token ids alone are decoded; each of n samples is a request; nothing that a client may send does harm."""
    texts = ("数字和颜色是什么", "\0 nul", "   ", "a" * 300)
    sent: list[tuple[Any, dict[str, int]]] = [([ord(c) for c in "tokens only"], {}), ("two samples of this", {"n": 2})]
    sent += [(text, {}) for text in texts]

    def all_asked() -> bool:
        found = asked(served)
        both = sum("two samples of this" in text for text in found) == 2
        return both and {texts[0], texts[-1]} <= set(found)

    requests = [functools.partial(complete, served, prompt, TOKENS, **more) for prompt, more in sent]
    assert begin_when(served, all_asked, *requests) == [TOKENS, 2 * TOKENS, *[TOKENS] * len(texts)]


def test_invariant_1_the_predictor_is_told_no_true_length(served: Served) -> None:
    """The same question with other hidden lengths is the same to it; a true length comes when the request has ended."""
    requests = [
        functools.partial(
            complete, served, "what will it be", TOKENS, extra_body={"vllm_xargs": {"bench_output_len": hidden}}
        )
        for hidden in (3, 11)
    ]
    begin_when(served, lambda: asked(served).count("what will it be") == 2, *requests)
    heard = [entry for entry in predictor_log(served) if entry.get("asked") == "what will it be"]
    assert len(heard) == 2
    assert heard[0] == heard[1]
    assert heard[0].keys() == {"asked", "max_tokens", "model"}

    def lengths() -> list[int]:
        return [each["tokens"] for each in predictor_log(served) if each.get("finished") == "what will it be"]

    wait_until(lambda: lengths() == [TOKENS, TOKENS], "what they became")


@pytest.mark.parametrize(("fault", "counted"), [("raise", "error"), ("nan", "error"), ("crash", "lost")])
def test_a_predictor_that_fails_costs_no_request_anything(served: Served, fault: str, counted: str) -> None:
    wait_until(lambda: up(served), "the predictor ready")
    bound = {"raise": 311, "nan": 312, "crash": 313}[fault]
    text = f"fault:{fault} if you please"
    assert complete_after(served, lambda: outcome(served, counted), text, bound) == bound
    assert record_of(served, bound)["prediction_source"] in ("history", "prior")
    wait_until(lambda: up(served), "the predictor back")
    assert complete_after(served, lambda: outcome(served, "predicted"), f"after {fault}", TOKENS) == TOKENS


def test_one_warning_tells_of_all_failures(served: Served) -> None:
    log = served.log_path.read_text(errors="replace")
    assert log.count("requests without a prediction are scheduled by the other sources") == 1
    assert "RuntimeError: told to" in log


def test_a_predictor_that_hangs_is_started_again_and_meanwhile_requests_flow(
    forks: ForkServer | None, llama: Path, tmp_path: Path
) -> None:
    """It is found out 5 s after a question of it could have been answered."""
    args = options(tmp_path / "predictor", timeout_s=1)
    with Served(llama, args, log_path=tmp_path / "server.log", forks=forks, modules=MODULES) as server:
        complete(server, "wake up", 1)
        wait_until(lambda: up(server), "the predictor ready")
        starts = server.metric("vllm_ext:predictor_starts_total")
        assert complete(server, "fault:hang now", 314) == 314
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda i: complete(server, f"meanwhile {i}", 20), range(16)))
        assert answers == [20] * 16
        unanswered = ("timeout", "late", "expired")
        wait_until(lambda: sum(outcome(server, name) for name in unanswered) >= 1, "the silence counted")
        complete(server, "fault:slow and still waiting", 3)
        wait_until(
            lambda: server.metric("vllm_ext:predictor_starts_total") > starts and up(server),
            "the predictor started again",
        )


def test_a_stopped_server_leaves_a_saved_predictor(forks: ForkServer | None, llama: Path, tmp_path: Path) -> None:
    args = options(tmp_path / "predictor", nice=5)
    with Served(llama, args, log_path=tmp_path / "server.log", forks=forks, modules=MODULES) as server:
        complete(server, "wake up", 1)
        wait_until(lambda: up(server), "the predictor ready")
        assert psutil.Process(worker_pid(server)).nice() == min(19, psutil.Process().nice() + 5)
        complete(server, "to be remembered", 5)
        wait_until(lambda: {"finished": "to be remembered", "tokens": 5} in predictor_log(server), "it was heard of")
    log = predictor_log(server)
    learned = sum("finished" in entry for entry in log)  # of the first request only if it ended after the start
    assert [entry["saved"] for entry in log if "saved" in entry][-1:] == [learned]


def test_the_predictor_killed_while_serving_comes_back(served: Served) -> None:
    wait_until(lambda: up(served), "the predictor ready")
    starts = served.metric("vllm_ext:predictor_starts_total")
    os.kill(worker_pid(served), signal.SIGKILL)
    assert complete(served, "nobody is there", 12) == 12
    wait_until(lambda: served.metric("vllm_ext:predictor_starts_total") > starts and up(served), "it is back")


RIVERS = ("Rhine", "Nile", "Amazon", "Danube", "Volga", "Congo", "Mekong", "Indus", "Tiber", "Elbe")


def test_what_was_trained_before_is_known_to_the_server(forks: ForkServer | None, llama: Path, tmp_path: Path) -> None:
    """`vllm-ext predictor train`, then `vllm serve` with the same folder and the encoder that ships: no download."""
    rows = [{"prompt": f"In one word: into which sea flows the {river}?", "output_tokens": 3} for river in RIVERS]
    rows += [{"prompt": f"Write a long story about a boat on the {river}.", "output_tokens": 90} for river in RIVERS]
    dataset, folder = tmp_path / "rows.jsonl", tmp_path / "predictor"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [str(Path(sys.executable).with_name("vllm-ext")), "predictor", "train", "--dataset", str(dataset)]
    command += ["--model", str(llama), "--out", str(folder)]
    environment = {**os.environ, **ENVIRONMENT}
    done = run(forks, "vllm_ext.cli.main:main", command, environment=environment, log=tmp_path / "train.log")
    assert done.code == 0, done.output
    log = tmp_path / "requests.jsonl"
    args = ["--scheduler-cls", "alise", "--ext-predictor-folder", str(folder), "--ext-request-log", str(log)]
    args += ["--ext-prediction-sources", "retrieval,history"]
    ours = {"vllm_ext": {"predictor": {"nice": 0, "timeout_s": HANG_S}}}
    args += ["--ext-metrics-interval-s", "0.2", "--additional-config", json.dumps(ours)]
    server_log = tmp_path / "server.log"
    with Served(llama, args, log_path=server_log, forks=forks, request_log=log, modules=MODULES) as server:
        complete(server, "wake up", 1)
        wait_until(lambda: up(server), "the predictor ready")
        assert server.metric("vllm_ext:predictor_entries") >= 20
        late = functools.partial(late_predictions, server)
        complete_after(server, late, "In one word: into which sea does the Rhine flow?", 400)
        complete_after(server, late, "Write a long story about a boat on the river Rhine.", 401)
        short, long = record_of(server, 400), record_of(server, 401)
        assert {short["prediction_source"], long["prediction_source"]} <= {"retrieval", "blend"}
        assert short["predicted_tokens"] == 3
        assert long["predicted_tokens"] == 90
        wait_until(lambda: server.metric("vllm_ext:predictor_entries") >= 22, "what was served, learned")


@pytest.mark.parametrize("multiprocessing", ["1", "0"], ids=["core in a process", "core in this process"])
def test_offline_use_predicts_as_well(
    forks: ForkServer | None, llama: Path, tmp_path: Path, multiprocessing: str
) -> None:
    own = {
        "folder": str(tmp_path / "predictor"), "factory": "odd_predictors:Obedient", "nice": 0, "timeout_s": HANG_S,
    }  # fmt: skip
    engine = {
        **BASE_ENGINE,
        "model": str(llama),
        "max_num_seqs": 4,
        "scheduler_cls": "alise",
        "additional_config": {"vllm_ext": {"predictor": own, "prediction": {"sources": ["retrieval", "history"]}}},
    }
    command = [sys.executable, str(offline_prediction.__file__), json.dumps(engine)]
    environment = {
        **os.environ, **ENVIRONMENT, "PYTHONPATH": str(HERE), "VLLM_ENABLE_V1_MULTIPROCESSING": multiprocessing,
    }  # fmt: skip
    done = run(forks, "offline_prediction:main", command, environment=environment, log=tmp_path / "offline.log")
    assert done.code == 0, done.output[-4000:]
    result = json.loads(next(line for line in done.output.splitlines() if line.startswith("RESULT"))[7:])
    assert result["tokens"] == [60] * 48
    assert result["late"] == 48
    assert result["sources"].count("retrieval") == 48
