"""Benchmarks are scripts that import each other by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
GPU = BENCHMARKS / "gpu"
FOLDERS = sorted({file.parent for file in BENCHMARKS.glob("*/*.py")})


@pytest.fixture(autouse=True)
def _scripts_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def encoder_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts back what an encoder sets: threads of torch, and parallel tokenizers."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class Letters:
    """A tokenizer with one token per letter."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return ([1] if add_special_tokens else []) + [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(token) for token in token_ids if token != 1)
