"""Ours on Ray Serve, with replicas that have no engine: who gets what, and what a client sees of faults."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.upstream import WITH_RAY
from vllm_ext.cluster.config import ENVIRONMENT

pytest.importorskip("ray.serve", reason="the extra ray is not installed")
pytestmark = [pytest.mark.e2e, WITH_RAY]
FOLDER = "VLLM_EXT_TEST_FAULTS"
"""As in `tests.support.canned_engine`, which is not imported here: it reads Ray's environment."""

ROOT = Path(__file__).resolve().parents[2]
REPLICAS = 3
_HISTORY_CHARS = 64_000
"""Of a conversation, whose KV is worth to stay for."""
_PATIENCE_S = 600.0
"""For what must happen sometime, whatever else the machine does."""


class Answer(NamedTuple):
    """What a client got."""

    status: int
    replica: int
    tokens: int
    ended: bool
    """Whether a stream ended as one that is whole."""
    broken: bool
    """Whether the transfer broke off, which every client notices."""


class Cluster:
    """A cluster that serves, and its faults."""

    def __init__(self, port: int, faults: Path, process: subprocess.Popen[str]) -> None:
        self.port, self.faults, self._process, self.version = port, faults, process, "1"

    def deploy(self, replicas: int, version: str) -> None:
        """Deploy anew; returns at once."""
        self.version = version
        assert self._process.stdin is not None
        self._process.stdin.write(f"{replicas} {version}\n")
        self._process.stdin.flush()

    def ask(
        self, tokens: int = 1, *, session: str = "", stream: bool = False, started: Callable[[int], None] | None = None
    ) -> Answer:
        """Send a request; ``started`` is told which replica sent the first token."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE_S)
        prompt = "p" * (_HISTORY_CHARS if session else 1)
        body = json.dumps({"model": "canned", "prompt": prompt, "max_tokens": tokens, "stream": stream})
        headers = {"content-type": "application/json", **({"x-session-id": session} if session else {})}
        read, broken, ended = 0, False, False
        status = replica = 0
        try:
            connection.request("POST", "/v1/completions", body, headers)
            answer = connection.getresponse()
            status, replica = answer.status, int(answer.getheader("x-replica") or 0)
            for line in _lines(answer):
                read += line.startswith(b"data: {")
                ended |= line.startswith(b"data: [DONE]") or (not stream and b'"tokens"' in line)
                if read == 1 and started is not None:
                    started(replica)
                    started = None
        except (http.client.HTTPException, OSError):
            broken = True
        finally:
            connection.close()
        return Answer(status, replica, read, ended, broken)

    def settled(self) -> bool:
        """Whether all have reported: before, requests go to those who have."""
        return len({one.replica for one in at_once([self.ask] * 3 * REPLICAS)}) == REPLICAS

    def fault(self, kind: str, replica: int) -> Path:
        return self.faults / f"{kind}.{replica}"

    def replicas(self) -> set[int]:
        """Return the processes that serve, asking until all have answered."""
        found: set[int] = set()

        def all_answered() -> bool:
            answer = self.ask()
            if answer.status == HTTPStatus.OK:
                found.add(answer.replica)
            return len(found) >= REPLICAS

        wait_until(all_answered)
        return found


def _lines(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield lines as they come. Iterating over an answer would not tell of a transfer that breaks off."""
    rest = b""
    while part := answer.read1(65536):
        *whole, rest = (rest + part).split(b"\n")
        yield from whole
    yield rest


def wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not done():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)


def at_once(clients: list[Callable[[], Answer]]) -> list[Answer]:
    answers: list[Answer] = []
    threads = [threading.Thread(target=lambda one=one: answers.append(one())) for one in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    place = tmp_path_factory.mktemp("cluster")
    port = free_port()
    environment = {
        **os.environ, **ENVIRONMENT, FOLDER: str(place), "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()), "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_AUTH_MODE": "disabled",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.support.canned_engine", str(port), str(REPLICAS)]
    with (place / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            stdin=subprocess.PIPE, text=True,
        )  # fmt: skip
    try:
        served = Cluster(port, place, process)

        def ready() -> bool:
            assert process.poll() is None, (place / "log").read_text()[-4000:]
            return "serving on" in (place / "log").read_text()

        wait_until(ready)
        wait_until(served.settled)
        yield served
        process.send_signal(signal.SIGTERM)
        assert process.wait(_PATIENCE_S) == 0
    finally:
        with_group(process)


def with_group(process: subprocess.Popen[str]) -> None:
    """End whatever is left of it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_turns_of_a_conversation_go_to_one_replica_and_strangers_to_all(cluster: Cluster) -> None:
    assert len(cluster.replicas()) == REPLICAS
    for number in range(4):
        first = cluster.ask(session=f"talk {number}").replica
        time.sleep(1)  # a report tells where its KV is
        assert {cluster.ask(session=f"talk {number}").replica for _ in range(3)} == {first}

    def strangers_go_to_all() -> bool:
        """As soon as the reports know that the histories above are computed."""
        together = at_once([lambda: cluster.ask(20) for _ in range(12)])
        assert Counter(one.status for one in together) == {200: 12}
        return len({one.replica for one in together}) == REPLICAS

    wait_until(strangers_go_to_all)


def test_tokens_arrive_one_by_one(cluster: Cluster) -> None:
    """A stream breaks off at the client, which has read some of it; the replica hears of that."""
    connection = http.client.HTTPConnection("127.0.0.1", cluster.port, timeout=_PATIENCE_S)
    body = json.dumps({"model": "canned", "prompt": "p", "max_tokens": 100_000, "stream": True})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    replica = int(answer.getheader("x-replica") or 0)
    assert next(answer.readline() for _ in range(3)).startswith(b"data: {")
    assert not cluster.fault("aborted", replica).exists()
    answer.close()
    connection.close()
    wait_until(cluster.fault("aborted", replica).exists)


def test_a_dead_engine_draws_no_requests(cluster: Cluster) -> None:
    """It answers soonest. At most three requests see an error; it is replaced."""
    (victim, *_) = before = cluster.replicas()
    cluster.fault("dead", victim).touch()
    answers = []
    for _ in range(40):
        answers.append(cluster.ask())
        time.sleep(0.05)
    failed = [one for one in answers if one.status != 200]
    assert len(failed) <= 3, failed
    assert all(one.status == 503 for one in failed)
    wait_until(lambda: len(cluster.replicas() - before) == 1)


def test_an_engine_that_hangs_is_passed_by_and_replaced(cluster: Cluster) -> None:
    """Though it has a stream that will never end, for which Ray would wait ten minutes."""
    before = cluster.replicas()
    begun, stuck = threading.Event(), list[Answer]()
    victims: list[int] = []

    def started(replica: int) -> None:
        victims.append(replica)
        begun.set()

    def streaming() -> None:
        stuck.append(cluster.ask(10_000, stream=True, started=started))

    stream = threading.Thread(target=streaming)
    stream.start()
    assert begun.wait(_PATIENCE_S)
    (victim,) = victims
    cluster.fault("hang", victim).touch()
    time.sleep(6)  # a report is believed for 5 s
    assert victim not in {cluster.ask().replica for _ in range(20)}
    wait_until(lambda: len(cluster.replicas() - before) == 1)
    assert victim not in cluster.replicas()
    stream.join(_PATIENCE_S)
    assert stuck[0].broken
    assert not stuck[0].ended


def test_a_killed_replica_ends_no_stream_as_if_it_were_whole(cluster: Cluster) -> None:
    """Of eight streams those that had begun there break off, those that had not are served elsewhere, none is lost."""
    cluster.replicas()
    begun: list[int] = []
    killed = threading.Event()

    def started(replica: int) -> None:
        begun.append(replica)
        if len(begun) == 8:
            os.kill(begun[0], signal.SIGKILL)
            killed.set()

    answers = at_once([lambda: cluster.ask(60, stream=True, started=started) for _ in range(8)])
    assert killed.is_set()
    of_victim = [one for one in answers if one.replica == begun[0]]
    assert of_victim
    assert all(one.broken and not one.ended for one in of_victim)
    others = [one for one in answers if one.replica != begun[0]]
    assert all((one.status, one.tokens, one.ended) == (200, 60, True) for one in others)
    wait_until(lambda: cluster.ask().status == 200)
    later = [cluster.ask() for _ in range(20)]
    assert [one.status for one in later] == [200] * 20


def test_who_has_no_token_yet_of_a_killed_replica_is_served_by_another(cluster: Cluster) -> None:
    """Answers that are not streamed have sent nothing until they end."""
    replicas = cluster.replicas()
    victim = cluster.ask(session="stays").replica
    assert victim in replicas
    killer = threading.Timer(1.0, lambda: os.kill(victim, signal.SIGKILL))
    killer.start()
    answers = at_once([lambda: cluster.ask(60, session="stays") for _ in range(6)])
    killer.join()
    assert {one.status for one in answers} <= {200, 503}, answers
    assert not any(one.broken for one in answers)
    assert sum(one.status == 200 for one in answers) == 6, answers


@pytest.mark.full
def test_a_rolling_update_loses_no_request(cluster: Cluster) -> None:
    """Requests come all the time while replica after replica is replaced."""
    before = cluster.replicas()
    cluster.deploy(REPLICAS, "2")
    answers: list[Answer] = []
    seen: set[int] = set()

    def all_are_new() -> bool:
        answers.extend(at_once([lambda: cluster.ask(10) for _ in range(6)]))
        seen.update(one.replica for one in answers[-6:])
        return len(seen - before) == REPLICAS and before.isdisjoint(one.replica for one in answers[-6:])

    wait_until(all_are_new)
    assert Counter(one.status for one in answers) == {200: len(answers)}


@pytest.mark.full
def test_a_replica_that_leaves_ends_what_it_began(cluster: Cluster) -> None:
    """From three replicas to two while all of them stream; last, as it leaves one less."""
    cluster.replicas()
    begun: list[int] = []

    def started(replica: int) -> None:
        begun.append(replica)
        if len(begun) == 9:
            cluster.deploy(REPLICAS - 1, cluster.version)

    answers = at_once([lambda: cluster.ask(120, stream=True, started=started) for _ in range(9)])
    assert len({one.replica for one in answers}) == REPLICAS
    assert all((one.status, one.tokens, one.ended) == (200, 120, True) for one in answers)

    def one_is_gone() -> bool:
        together = at_once([lambda: cluster.ask(4) for _ in range(6)])
        assert Counter(one.status for one in together) == {200: 6}
        return len({one.replica for one in together}) == REPLICAS - 1

    wait_until(one_is_gone)
