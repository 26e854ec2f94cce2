"""`vllm-ext demo` as a user runs it: a real server, and nothing of it left afterwards, however the demo ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.server, pytest.mark.timeout(420)]

DEMO = "import sys; from vllm_ext.cli.demo import main; sys.exit(main(sys.argv[1:]))"
OFFLINE = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


class RunningDemo:
    """A demo in a process of its own, its output so far, and every process that it ever had below it."""

    def __init__(self, folder: Path, *args: str) -> None:
        self.out = folder / "out.txt"
        self.err = folder / "err.txt"
        self.descendants: set[psutil.Process] = set()
        with self.out.open("wb") as out, self.err.open("wb") as err:
            env = {**os.environ, **OFFLINE, "TMPDIR": str(folder)}
            self.process = subprocess.Popen([sys.executable, "-c", DEMO, *args], stdout=out, stderr=err, env=env)
        self._watching = True
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def _watch(self) -> None:
        while self._watching:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.descendants.update(psutil.Process(self.process.pid).children(recursive=True))
            time.sleep(0.1)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the demo ended early:\n{self.err.read_text()}"
            assert time.monotonic() < deadline, f"timed out:\n{self.err.read_text()}"
            time.sleep(0.1)

    def end(self, number: int | None = None, timeout_s: float = 300.0) -> int:
        """Wait for the end, after a signal if one is given; return the exit status."""
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def leftovers(self) -> list[str]:
        """Command lines of what is still running below the demo, a moment after its end."""
        _, alive = psutil.wait_procs(self.descendants, timeout=5)
        left = []
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    left.append(" ".join(process.cmdline()))
        return left

    def close(self) -> None:
        self._watching = False
        self._watcher.join()
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*self.descendants, psutil.Process(self.process.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RunningDemo]]:
    started: list[RunningDemo] = []

    def run(*args: str) -> RunningDemo:
        started.append(RunningDemo(tmp_path, *args))
        return started[-1]

    yield run
    for demo in started:
        demo.close()


def rows(table: str) -> list[list[str]]:
    """The cells of the demo's table, the column `kind` taken as one word."""
    return [line.replace(" stream", "+stream").split() for line in table.splitlines() if line.lstrip()[:1].isdigit()]


def test_table_has_one_finished_row_per_request_with_its_prediction(start: Callable[..., RunningDemo]) -> None:
    demo = start("--requests", "8")
    assert demo.end() == 0, demo.err.read_text()
    table = demo.out.read_text()
    # the summary line starts with a digit too
    *requests, summary = rows(table)
    assert [row[0] for row in requests] == [str(number) for number in range(1, 9)]
    for row in requests:
        predicted, true = row[3].split("/")
        assert int(predicted) > 0
        assert int(true) > 0
        assert row[4] in ("hint", "history", "prior")
        assert row[-1] in ("length", "stop")
    assert " ".join(summary).startswith("8 of 8 requests finished")
    assert "vllm_ext:policy_fallbacks_total{} 0" in table
    assert len(demo.descendants) >= 2
    assert demo.leftovers() == []


def test_plain_vllm_keeps_serving_until_ctrl_c_and_leaves_nothing(start: Callable[..., RunningDemo]) -> None:
    demo = start("--requests", "3", "--scheduler-cls", "", "--keep-serving")
    demo.wait_for(lambda: "Ctrl-C to stop" in demo.err.read_text())
    *requests, _ = rows(demo.out.read_text())
    assert [row[3].split("/")[0] for row in requests] == ["-"] * 3
    url = demo.err.read_text().rpartition("curl ")[2].split()[0]
    with urllib.request.urlopen(url, timeout=10) as response:
        assert b"vllm:num_preemptions_total" in response.read()
    assert demo.end(signal.SIGINT, timeout_s=60) == 0
    assert demo.leftovers() == []


@pytest.mark.parametrize(
    ("number", "num_processes"),
    [
        pytest.param(signal.SIGINT, 1, id="ctrl-c-at-once"),
        pytest.param(signal.SIGTERM, 3, id="sigterm-while-the-engine-starts"),
    ],
)
def test_signal_during_start_up_stops_the_server(
    start: Callable[..., RunningDemo], number: signal.Signals, num_processes: int
) -> None:
    """The third process is the engine core: the first is the API server, the second Python's resource tracker."""
    demo = start("--scheduler-cls", "")
    demo.wait_for(lambda: len(demo.descendants) >= num_processes)
    assert demo.end(number, timeout_s=60) == 128 + number
    assert "the server is stopped" in demo.err.read_text()
    assert demo.leftovers() == []


def test_server_that_does_not_start_shows_its_log_and_fails(start: Callable[..., RunningDemo], tmp_path: Path) -> None:
    (tmp_path / "no-model").mkdir()
    demo = start("--scheduler-cls", "", "--model", str(tmp_path / "no-model"))
    assert demo.end() == 1
    message = demo.err.read_text()
    assert "before it answered" in message
    assert "no-model" in message.partition("server.log:\n")[2], "the tail of the log says what is wrong"
    assert demo.out.read_text() == ""
    assert demo.leftovers() == []
