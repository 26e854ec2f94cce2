"""Two tiny models of real engines on Ray Serve, as `vllm-ext cluster serve` starts them. Takes 10 GB, and minutes."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from servers import HANG_S, MODEL, SMALL_ENGINE, wait_until

from tests.support.upstream import WITH_RAY

pytest.importorskip("ray.serve", reason="the extra ray is not installed")
pytestmark = [pytest.mark.e2e, WITH_RAY, pytest.mark.full, pytest.mark.timeout(6 * HANG_S)]
_PORTS = range(30000, 30016)
"""Of replicas, as Ray gives them."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Served(NamedTuple):
    """What `vllm-ext cluster serve` serves."""

    port: int
    process: subprocess.Popen[bytes]

    def ask(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        session = fields.pop("session", "")
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 4, **fields}).encode(),
            {"content-type": "application/json", **({"x-session-id": session} if session else {})},
        )
        try:
            with urllib.request.urlopen(request, timeout=HANG_S) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, {"retry-after": error.headers.get("retry-after")}

    def stream(self, tokens: int, lines: list[bytes]) -> http.client.HTTPConnection:
        """Begin a stream; its lines come in a thread, until the connection is closed."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        body = {"model": MODEL, "prompt": "hello", "max_tokens": tokens, "stream": True, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200

        def read() -> None:
            try:
                while part := answer.read1(65536):
                    lines.extend(part.splitlines())
            except (OSError, http.client.HTTPException, ValueError, AttributeError):
                lines.append(b"broken")
            lines.append(b"end")

        threading.Thread(target=read, daemon=True).start()
        return connection

    def loads(self) -> dict[int, dict[str, Any]]:
        """Reports of the replicas, each from its own port."""
        found = {}
        for port in _PORTS:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/vllm-ext/load", timeout=5) as answer:
                    (found[port],) = json.loads(answer.read())["engines"]
            except OSError:
                continue
        return found

    def engine_cores(self) -> list[psutil.Process]:
        ours = (one for one in psutil.process_iter() if "EngineCore" in " ".join(_command(one)))
        return [one for one in ours if self.process.pid in {each.pid for each in one.parents()}]


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


@pytest.fixture(scope="module")
def served(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    place, port = tmp_path_factory.mktemp("ray"), free_port()
    environment = {
        **os.environ, "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()), "RAY_AUTH_MODE": "disabled",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "vllm_ext.cli.main", "cluster", "serve", str(llama), "--replicas", "2",
        "--host", "127.0.0.1", "--port", str(port), "--scheduler-cls", "alise+pensieve", "--kv-tier-gib", "0.5",
        *SMALL_ENGINE, "--max-model-len", "2048",
    ]  # fmt: skip
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def ready() -> bool:
        text = (place / "log").read_text(errors="replace")
        assert process.poll() is None, text[-4000:]
        return "vllm-ext: serving on" in text

    try:
        deadline = time.monotonic() + 3 * HANG_S
        while not ready():
            assert time.monotonic() < deadline, (place / "log").read_text(errors="replace")[-4000:]
            time.sleep(1)
        yield Served(port, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) == 0
    finally:
        for one in [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []:
            one.kill()
        process.kill()


def test_conversations_stay_and_are_reported_where_they_are(served: Served) -> None:
    for number in range(4):
        for _ in range(3):
            status, answer = served.ask(prompt="so " * 300, session=f"talk {number}")
            assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
    wait_until(lambda: sum(len(one["resident"]) for one in served.loads().values()) == 4, "reports of four")
    assert len(served.loads()) == 2
    assert all(one["resident"] for one in served.loads().values()), "both have some"


def test_hints_and_refusals_pass(served: Served) -> None:
    assert served.ask(vllm_xargs={"osl": 8})[0] == 200
    assert served.ask(vllm_xargs={"osl": -1})[0] == 400
    assert served.ask(model="other")[0] == 404


def test_a_client_that_leaves_frees_its_replica(served: Served) -> None:
    lines: list[bytes] = []
    connection = served.stream(1500, lines)
    wait_until(lambda: len(lines) > 3, "tokens")
    assert sum(one["running"] for one in served.loads().values()) == 1
    connection.sock.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: sum(one["running"] for one in served.loads().values()) == 0, "the end of the request")


def test_an_engine_that_dies_is_told_of_in_streams_and_costs_later_requests_nothing(served: Served) -> None:
    lines: list[list[bytes]] = [[] for _ in range(8)]
    for one in lines:
        served.stream(1500, one)
    wait_until(lambda: all(len(one) > 3 for one in lines), "tokens of all")
    cores = served.engine_cores()
    assert len(cores) == 2
    cores[0].kill()
    answers = [served.ask()[0] for _ in range(40)]
    assert answers.count(200) >= 37, answers
    wait_until(lambda: all(one[-1] == b"end" for one in lines), "the ends of all")
    failed = [one for one in lines if any(b'"error"' in line for line in one) or b"broken" in one]
    assert 0 < len(failed) < 8
    assert all(any(b"[DONE]" in line for line in one) for one in lines if one not in failed)
