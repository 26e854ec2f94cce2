"""Shared parts of the end-to-end tests: tiny models, and the server that most tests share.

These tests start vLLM itself, offline and over HTTP. Nothing is mocked; the models are tiny and random, the device is
the CPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.extent import FULL
from vllm_ext import tiny_model

sys.path.append(str(Path(__file__).parent))  # the helper modules beside this file

if TYPE_CHECKING:
    from engines import Engines
    from forks import ForkServer
    from servers import Served


@pytest.fixture(scope="session")
def llama() -> Path:
    return tiny_model.build(style="llama", seed=0)


@pytest.fixture(scope="session")
def opt() -> Path:
    return tiny_model.build(style="opt", seed=0)


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer | None]:
    """What commands are forked from; in full they are started as users start them, and import vLLM each."""
    from forks import ForkServer

    if FULL:
        yield None
        return
    with contextlib.closing(ForkServer(tmp_path_factory.mktemp("forks") / "log.txt")) as server:
        yield server


@pytest.fixture(scope="session")
def run_engines(forks: ForkServer | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    from engines import Engines

    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "references"
    shared.mkdir(exist_ok=True)
    with contextlib.closing(Engines(tmp_path_factory.mktemp("engines"), shared, forks)) as engines:
        yield engines


@pytest.fixture(scope="session")
def alise(forks: ForkServer | None, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server under alise with few seats and few KV blocks, so that requests do get in each other's way.

    Its clock goes by its steps, and these by its turnstile.
    """
    from engines import EAGER
    from servers import Served

    from vllm_ext.demo.server import group_members

    folder = tmp_path_factory.mktemp("alise")
    request_log = folder / "requests.jsonl"
    args = [
        "--scheduler-cls",
        "alise-published",
        "--ext-metrics-interval-s",
        "0.2",
        "--ext-request-log",
        str(request_log),
    ]
    args += ["--additional-config", json.dumps(EAGER)]
    small = ["--max-num-seqs", "4", "--num-gpu-blocks-override", "40"]
    log = folder / "server.log"
    served = Served(llama, [*args, *small], log_path=log, forks=forks, request_log=request_log, modules=["turnstile"])
    with served as server:
        yield server
        group = server.pid
    assert group_members(group) == []
