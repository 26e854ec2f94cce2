"""Predictions of output lengths on recorded traffic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.learned_parts import WordEncoder
from vllm_ext.datasets import DatasetError
from vllm_ext.prediction import encoder
from vllm_ext.quality import traffic


@pytest.fixture(autouse=True)
def _word_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "Encoder", lambda *_, **__: WordEncoder())


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(text: str) -> int:
    return len(text.split())


def log(folder: Path, count: int = 200) -> Path:
    """A request log: short prompts have answers of 5 tokens, long ones of 500."""
    rows = [
        {"arrival_unix_s": 1000.0 - n, "prompt_tokens": 600 if n % 2 else 20, "output_tokens": 500 if n % 2 else 5}
        for n in range(count)
    ]
    return written(folder, rows)


def test_request_log_is_replayed_by_arrival_and_judges_the_history_alone(tmp_path: Path) -> None:
    served = traffic.read(log(tmp_path), words, "m")
    assert [done.prompt.prompt_tokens for done in served.finished[:2]] == [600, 20], "the last line came first"
    found, why = traffic.judged(served)
    assert set(found) == {"history"}
    assert found["history"]["tau"] > 0.8, "the server's own history goes by prompt length"
    assert why == "requests.jsonl holds no prompts"


def test_prompts_are_judged_where_the_file_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"prompt": f"say {'more' if n % 2 else 'little'} about it", "output_tokens": 300 if n % 2 else 3}
        for n in range(400)
    ]
    served = traffic.read(written(tmp_path, rows), words, "m")
    done: list[int] = []
    found, why = traffic.judged(served, done.append)
    assert not why
    assert found["prompts"]["tau"] > found["history"]["tau"] + 0.3, "prompts of one length"
    assert set(found["prompts"]) == {"tau", "coverage", "relative_error"}
    assert done[-1] == 400
    monkeypatch.setattr(traffic, "can_predict_from_prompts", lambda encoder: False)
    found, why = traffic.judged(served)
    assert set(found) == {"history"}
    assert "vllm-ext[prediction]" in why


def test_no_request_is_learned_before_it_is_judged(tmp_path: Path) -> None:
    """Lengths that change for good at request 128: nothing knows them before the first of them ended."""
    rows = [
        {"arrival_unix_s": float(n), "prompt_tokens": 9, "output_tokens": 10 if n < 128 else 900} for n in range(192)
    ]
    found, _ = traffic.judged(traffic.read(written(tmp_path, rows), words, "m"))
    assert found["history"]["coverage"] == 0.5, "the first 64 are not judged, the last 64 know nothing of 900"


def test_file_without_lengths_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="output"):
        traffic.read(written(tmp_path, [{"prompt": "no answer"}]), words, "m")


def test_too_few_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="127 requests with their lengths; at least 128 are needed"):
        traffic.read(log(tmp_path, 127), words, "m")
