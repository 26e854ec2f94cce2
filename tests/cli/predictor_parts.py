"""What the tests of `vllm-ext predictor` share: a made-up encoder, datasets, and predictors trained from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vllm_ext.cli.predictor import main
from vllm_ext.prediction import encoder, store_files
from vllm_ext.prediction.folder import STORE
from vllm_ext.prediction.store_rows import Entries

DIM = 8
ROWS = 120
FAST = ("--hidden", "16", "--epochs", "6")
SECRET = "xylophone"
"""In every prompt."""


class FakeEncoder:
    """Embeds ``... mood M seed S``: the mood, -9 to 9, is the first coordinate. Words are tokens."""

    dim = DIM

    def __init__(self, model: str | None, *, threads: int, max_tokens: int, window: str) -> None:
        self.name = f"{model or 'fake'}@0123:{window}-{max_tokens}"

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        rows = []
        for text in texts:
            mood, seed = int(text.split()[-3]), int(text.split()[-1])
            row = np.random.default_rng(seed).standard_normal(DIM)
            row[0] = mood
            rows.append(row / np.linalg.norm(row))
        return np.array(rows, np.float32)

    def count_tokens(self, text: str) -> int:
        return len(text.split())


def use_fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The made-up encoder, and a cache of the test's own."""
    monkeypatch.setattr(encoder, "Encoder", FakeEncoder)
    monkeypatch.setenv("VLLM_EXT_CACHE", str(tmp_path / "cache"))


def write_dataset(path: Path, count: int = ROWS, *, start: int = 0) -> str:
    """Answers of 9 to 63 words that depend on the mood."""
    rows = []
    for n in range(start, start + count):
        mood = n % 19 - 9
        output = "word " * (36 + 3 * mood)
        rows.append({"prompt": f"{SECRET} mood {mood} seed {n}", "output": output, "kind": str(n % 2)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def trained(
    tmp_path: Path, name: str = "p", *options: str, count: int = ROWS, start: int = 0, model: str = "m"
) -> Path:
    data = write_dataset(tmp_path / f"{name}.jsonl", count, start=start)
    out = tmp_path / name
    assert main(["train", "--dataset", data, "--model", model, "--out", str(out), "--quiet", *FAST, *options]) == 0
    return out


def result(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    last: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return last


def entries_of(folder: Path) -> Entries:
    return store_files.read(folder / STORE)[0]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def complaint(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> str:
    """Run what must be refused and return the one line that says why."""
    try:
        status = main(arguments)
    except SystemExit as stopped:  # argparse
        status = int(stopped.code or 0)
    shown = capsys.readouterr()
    assert status == 2
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    return line
