"""`vllm-ext quality`: the verdict is the exit status, and what is wrong is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from vllm_ext.cli.quality import main
from vllm_ext.quality import kv_formats
from vllm_ext.quality.kv_formats import KvFormat
from vllm_ext.tiny_model import build
from vllm_ext.tiny_model.corpus import PROSE


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(directory=tmp_path_factory.mktemp("models")))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} {PROSE}"}) + "\n" for n in range(10)))
    return path


def few(*flags: object) -> list[str]:
    return [*map(str, flags), "--sequences", "8", "--tokens", "64", "--block-size", "16", "--greedy-tokens", "4"]


def through(monkeypatch: pytest.MonkeyPatch, change: KvFormat) -> None:
    """Let 8 bits return something else."""
    monkeypatch.setattr(kv_formats, "int8", lambda block, dtype: change)


def result_of(capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    printed = capsys.readouterr()
    return json.loads(printed.out.splitlines()[-1]), printed.err


def test_a_codec_that_changes_nothing_passes(
    tiny: str, texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    through(monkeypatch, torch.clone)
    assert main(few(tiny, "--texts", texts)) == 0
    result, told = result_of(capsys)
    assert result["metrics"]["perplexity_change_percent"] == 0
    assert result["metrics"]["greedy_same_share"] == result["metrics"]["top_token_same_share"] == 1
    assert set(result["baselines"]) == {"exact", "fp8_e4m3", "bfloat16"}
    assert result["config"]["dtype"] == "float32"
    assert "passes: perplexity changes by 0 % (0..0), limit 0.1 %" in told


def test_a_codec_that_returns_zeros_does_not_pass(
    tiny: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    through(monkeypatch, torch.zeros_like)
    page, out = tmp_path / "page.html", tmp_path / "quality.json"
    assert main(few(tiny, "--texts", texts, "--dtype", "bfloat16", "--html", page, "--out", out)) == 1
    result, told = result_of(capsys)
    assert result == json.loads(out.read_text())
    assert result["metrics"]["logprob_change_mean_abs_nats"] > 0
    assert set(result["baselines"]) == {"exact", "fp8_e4m3"}, "nothing to compare bfloat16 with"
    assert "does not pass: perplexity changes by" in told
    html = page.read_text()
    assert "does not pass" in html
    assert "<svg" in html


def test_lengths_of_a_request_log_are_judged_beside(
    tiny: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    through(monkeypatch, torch.clone)
    log = tmp_path / "requests.jsonl"
    log.write_text("".join(json.dumps({"arrival_unix_s": n, "prompt_tokens": 9, "output_tokens": n}) + "\n"
                           for n in range(1, 200)))  # fmt: skip
    assert main(few(tiny, "--texts", texts, "--request-log", log)) == 0
    result, told = result_of(capsys)
    assert {name for name in result["metrics"] if "/" in name} == {
        "history/tau", "history/coverage", "history/relative_error",
    }  # fmt: skip
    assert "the predictor of prompts was not judged: requests.jsonl holds no prompts" in told


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "--texts: needed"),
        (["--texts", "TEXTS", "--tokens", "100"], "--tokens 100: must be at least two blocks (128)"),
        (["--texts", "TEXTS", "--sequences", "7"], "--sequences 7: must be at least 8"),
        (["--texts", "TEXTS", "--tokens", "8192"], "takes at most 4096"),
        (["--texts", "TEXTS", "--tokens", "4096"], "at least 8 are needed"),
        (["--texts", "no-such-file.txt"], "no-such-file.txt: cannot be read"),
        (["--texts", "TEXTS", "--request-log", "no-such-log"], "no-such-log: cannot be read"),
    ],
    ids=["no texts", "tokens", "sequences", "too long", "too little", "no file", "no log"],
)
def test_what_is_wrong_is_one_line(
    flags: list[str], told: str, tiny: str, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([tiny, *(str(texts) if flag == "TEXTS" else flag for flag in flags)]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_unsupported_model_is_one_line(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers.MistralConfig().save_pretrained(tmp_path / "model")
    assert main([str(tmp_path / "model"), "--texts", str(texts)]) == 2
    error = capsys.readouterr().err
    assert "no sliding window" in error
    assert error.count("\n") == 1


def test_a_model_that_overflows_is_a_failure(
    tiny: str, texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kv_formats, "exact", lambda values: values * float("nan"))
    assert main(few(tiny, "--texts", texts)) == 3
    assert "not finite in torch.float32: try another --dtype" in capsys.readouterr().err


def test_kv_that_8_bits_cannot_hold_is_a_failure(
    tiny: str, texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(values: torch.Tensor) -> torch.Tensor:
        raise kv_formats.NoRecord("a block of KV can't be kept")

    through(monkeypatch, none)
    assert main(few(tiny, "--texts", texts)) == 3
    assert "a block of KV can't be kept" in capsys.readouterr().err
