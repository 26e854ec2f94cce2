"""A server with a predictor that does what prompts tell it to (`odd_predictors`), and what the two have logged."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from servers import HANG_S, MODEL, Served, wait_until

T = TypeVar("T")


def options(folder: Path, **predictor: Any) -> list[str]:
    """With the priority of the server itself: a predictor of the lowest waits for a core, where others want it too.

    No question is given up as the predictor takes long.
    """
    own = {"factory": "odd_predictors:Obedient", "timeout_s": HANG_S, "nice": 0, **predictor}
    return [
        *("--scheduler-cls", "alise", "--ext-metrics-interval-s", "0.2"),
        *("--ext-prediction-sources", "hint,retrieval,history"),
        *("--additional-config", json.dumps({"vllm_ext": {"predictor": {"folder": str(folder), **own}}})),
    ]


def up(server: Served) -> bool:
    return server.metric("vllm_ext:predictor_up") == 1


def outcome(server: Served, name: str) -> float:
    try:
        return server.metric("vllm_ext:length_predictions_total", outcome=name)
    except LookupError:
        return 0.0


def complete(server: Served, text: Any, max_tokens: int, **kwargs: Any) -> int:
    """Return how many tokens came back, over all choices."""
    body = {"ignore_eos": True, **kwargs.pop("extra_body", {})}
    answer = server.client().completions.create(
        model=MODEL, prompt=text, max_tokens=max_tokens, extra_body=body, **kwargs
    )
    assert answer.usage is not None
    return answer.usage.completion_tokens


def late_predictions(server: Served) -> float:
    """Return how many predictions have reached the scheduler."""
    return server.metric("vllm_ext:late_predictions_total")


def begin_when(server: Served, condition: Callable[[], bool], *requests: Callable[[], T]) -> list[T]:
    """Send requests at once, to be begun when a condition holds by what came of their questions; returns answers."""
    with ThreadPoolExecutor(len(requests)) as pool, server.turnstile.closed():
        answers = [pool.submit(request) for request in requests]
        wait_until(condition, "what came of questions whose requests wait")
    return [answer.result() for answer in answers]


def complete_after(server: Served, count: Callable[[], float], text: str, max_tokens: int) -> int:
    """Complete a request that begins when a count has grown by what came of its question."""
    before = count()
    (tokens,) = begin_when(server, lambda: count() > before, lambda: complete(server, text, max_tokens))
    return tokens


def predictor_log(server: Served) -> list[dict[str, Any]]:
    file = server.log_path.parent / "predictor" / "log.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def asked(server: Served) -> list[str]:
    return [entry["asked"] for entry in predictor_log(server) if "asked" in entry]


def record_of(server: Served, max_tokens: int) -> dict[str, Any]:
    """The record of the one request with this bound."""
    found: list[dict[str, Any]] = []

    def there() -> bool:
        found[:] = [r for r in server.records() if r["max_tokens"] == max_tokens]
        return bool(found)

    wait_until(there, f"a record of the request with max_tokens={max_tokens}")
    assert len(found) == 1
    return found[0]


def worker_pid(server: Served) -> int:
    import psutil

    found = [
        process.pid
        for process in psutil.Process(server.pid).children(recursive=True)
        if "vllm_ext.predictor.worker" in process.cmdline()
    ]
    assert len(found) == 1
    return found[0]
