"""`vllm-ext cellular`: a model is trained, profiled and served; bad input is refused by name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from tests.support.extent import HANG_S
from vllm_ext.cellular.models import build, save
from vllm_ext.cellular.train import trained
from vllm_ext.cli.cellular import main
from vllm_ext.demo.server import free_port


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save(build("lstm", hidden=8), tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def test_demo_shows_that_short_requests_leave_early(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    cellular, padded = capsys.readouterr().out.split("\n\n")
    ends = [[int(line.split()[-1]) for line in part.splitlines() if line.startswith("req") and line[3].isdigit()]
            for part in (cellular, padded)]  # fmt: skip
    assert ends[0] == [2, 3, 3, 5, 7, 10, 6, 6]
    assert ends[1] == [10] * 4 + [20] * 4
    assert cellular.splitlines()[2].split()[2:4] == ["#", "#"]


def test_training_teaches() -> None:
    _, before = trained("treelstm", steps=10, hidden=16)
    _, after = trained("treelstm", steps=120, hidden=16)
    assert before + 0.15 < after > 0.8


@pytest.mark.parametrize("kind", ["lstm", "seq2seq", "rnnt"])
def test_training_goes_down_a_loss_of_all_cells(kind: str) -> None:
    fresh = build(kind, hidden=8)
    model, _ = trained(kind, steps=3, hidden=8)
    for name, module in model.modules.items():
        changed = [not value.equal(fresh.modules[name].state_dict()[key]) for key, value in module.state_dict().items()]
        assert all(changed), name
    assert not any(weight.requires_grad for module in model.modules.values() for weight in module.parameters())


def test_a_profile_is_written_and_read_again(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "profile.json"
    assert main(["profile", str(weights), "--batches", "1,8", "--repeats", "1", "--out", str(out)]) == 0
    assert re.search(r"^knee +\d+ +\d+$", capsys.readouterr().out, re.MULTILINE)
    assert {name: [*one["seconds"]] for name, one in json.loads(out.read_text())["cells"].items()} == {
        "step": ["1", "8"],
        "head": ["1", "8"],
    }


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["serve", "gru"], "model='gru': must be a file of weights, or one of lstm"),
        (["serve", "FILE", "--order", "lifo"], "order='lifo': must be one of arrival, slack"),
        (["serve", "FILE", "--compile"], "compile=True: must be left out with device='cpu'"),
        (["serve", "FILE", "--cells", "any"], "cells='any': must be one of published, alternate"),
        (["serve", "FILE", "--max-batch", "step"], "'step': must be NAME=NUMBER"),
        (["serve", "FILE", "--max-batch", "gate=3"], r"max_batch=\['gate'\]: lstm has step, head"),
        (["serve", "FILE", "--profile", "FILE"], "is no profile"),
        (["serve", "FILE", "--workers", "0"], "workers=0"),
        (["train", "lstm", "--out", "x", "--size", "width=3"], "width=3: lstm has"),
        (["demo", "--max-batch", "0"], "max_batch=0"),
    ],
)
def test_bad_input_is_refused_by_name(
    argv: list[str], said: str, weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(weights) if part == "FILE" else part for part in argv]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_profile_of_another_model_is_refused(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile.json"
    main(["profile", str(weights), "--batches", "1", "--repeats", "1", "--out", str(out)])
    save(build("lstm", hidden=9), weights)
    assert main(["serve", str(weights), "--profile", str(out)]) == 2
    assert "'hidden': 8" in capsys.readouterr().err


def test_the_command_serves(weights: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "vllm_ext.cli.main", "cellular", "serve", str(weights), "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert "serving lstm" in process.stderr.readline()
            body = json.dumps({"tokens": [1, 2, 3]}).encode()
            pause = threading.Event()
            for _ in range(int(HANG_S)):
                try:
                    answer = urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/infer", body, timeout=HANG_S)
                    break
                except OSError:
                    assert process.poll() is None
                    pause.wait(0.2)
            assert json.loads(answer.read()).keys() == {"label", "scores"}
        finally:
            process.terminate()
        process.wait(HANG_S)
