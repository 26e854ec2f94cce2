"""Shared parts of the end-to-end tests: tiny models, and the server that most tests share.

These tests start vLLM itself, offline and over HTTP. Nothing is mocked; the models are tiny and random, the device is
the CPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from vllm_ext import tiny_model

sys.path.append(str(Path(__file__).parent))  # the helper modules beside this file

if TYPE_CHECKING:
    from servers import Served


@pytest.fixture(scope="session")
def llama() -> Path:
    return tiny_model.build(style="llama", seed=0)


@pytest.fixture(scope="session")
def opt() -> Path:
    return tiny_model.build(style="opt", seed=0)


@pytest.fixture(scope="session")
def alise(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server under alise with few seats and few KV blocks, so that requests do get in each other's way."""
    from engines import EAGER
    from servers import Served

    folder = tmp_path_factory.mktemp("alise")
    request_log = folder / "requests.jsonl"
    args = ["--scheduler-cls", "alise", "--ext-metrics-interval-s", "0.2", "--ext-request-log", str(request_log)]
    args += ["--additional-config", json.dumps(EAGER)]
    small = ["--max-num-seqs", "4", "--num-gpu-blocks-override", "40"]
    with Served(llama, [*args, *small], log_path=folder / "server.log", request_log=request_log) as server:
        yield server
