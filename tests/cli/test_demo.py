"""`vllm-ext demo` as a user runs it: a real server, and nothing of it left afterwards, however the demo ends."""

from __future__ import annotations

import contextlib
import os
import re
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

from tests.support.extent import HANG_S
from vllm_ext.prediction.learned import BLEND, REGRESSED, RETRIEVAL

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3 * HANG_S)]

DEMO = """
import sys
from vllm_ext.cli import demo
demo.RECORDS_WAIT_S = float(sys.argv[1])
sys.exit(demo.main(sys.argv[2:]))
"""
"""The demo; its first argument is how long it waits for the records of requests."""
WITH_SERVER = """
import sys
from vllm_ext.cli.demo import main
from vllm_ext.demo.server import ServerProcess
ServerProcess.command = property(lambda self: [sys.executable, "-c", sys.argv[1], self.model])
ServerProcess.__init__.__kwdefaults__["stop_grace_s"] = 1.0
sys.exit(main(sys.argv[2:]))
"""
"""The demo with another program, its first argument, in the place of `vllm serve`; it need not be given long to end."""
STUBBORN = "import os, time; os.fork(); time.sleep(600)"
"""Two processes that never answer."""
FAILING = "import sys; exit(f'no model in {sys.argv[1]}')"
PREDICTED = (RETRIEVAL, REGRESSED, BLEND)
"""Where lengths come from once the predictor has started, which may take longer than all requests, or not."""
OFFLINE = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


class RunningDemo:
    """A demo in a process of its own, its output so far, and every process that it ever had below it."""

    def __init__(self, folder: Path, *args: str, server: str | None) -> None:
        """Start the demo; ``server`` is a program that stands for `vllm serve`, None for the real one."""
        self.out = folder / "out.txt"
        self.err = folder / "err.txt"
        self.descendants: set[psutil.Process] = set()
        with self.out.open("wb") as out, self.err.open("wb") as err:
            env = {**os.environ, **OFFLINE, "TMPDIR": str(folder)}
            program = [DEMO, str(HANG_S)] if server is None else [WITH_SERVER, server]
            self.process = subprocess.Popen([sys.executable, "-c", *program, *args], stdout=out, stderr=err, env=env)
        self._watching = True
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def _watch(self) -> None:
        while self._watching:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.descendants.update(psutil.Process(self.process.pid).children(recursive=True))
            time.sleep(0.1)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = HANG_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the demo ended early:\n{self.err.read_text()}"
            assert time.monotonic() < deadline, f"timed out:\n{self.err.read_text()}"
            time.sleep(0.1)

    def end(self, number: int | None = None, timeout_s: float = HANG_S) -> int:
        """Wait for the end, after a signal if one is given; return the exit status."""
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def leftovers(self) -> list[str]:
        """Command lines of what is still running below the demo, a moment after its end."""
        _, alive = psutil.wait_procs(self.descendants, timeout=60)
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
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RunningDemo]]:
    started: list[RunningDemo] = []
    folder = tmp_path_factory.mktemp(
        "d"
    )  # a short name: vLLM makes sockets in it, whose paths have 107 characters at most

    def run(*args: str, server: str | None = None) -> RunningDemo:
        started.append(RunningDemo(folder, *args, server=server))
        return started[-1]

    yield run
    for demo in started:
        demo.close()


def rows(table: str) -> list[list[str]]:
    """The cells of the demo's table, the column `kind` taken as one word."""
    return [line.replace(" stream", "+stream").split() for line in table.splitlines() if line.lstrip()[:1].isdigit()]


def test_table_has_one_finished_row_per_request_and_the_server_stays_until_ctrl_c(
    start: Callable[..., RunningDemo],
) -> None:
    demo = start("--duel", "--requests", "8", "--keep-serving")
    demo.wait_for(lambda: "Ctrl-C to stop" in demo.err.read_text())
    duel, who_pays, table = demo.out.read_text().partition("Who pays with alise: ")
    means = {
        name: (float(base), float(ours))
        for name, base, ours in re.findall(r"^(mean [^(]+) \(\S+\) +(\S+) +(\S+)", duel, re.MULTILINE)
    }
    assert who_pays
    base, ours = means["mean e2e"]
    assert 0 < ours < base, "by a clock that is the same on every machine"
    # the summary line starts with a digit too
    *requests, summary = rows(table)
    assert [row[0] for row in requests] == [str(number) for number in range(1, 9)]
    for row in requests:
        predicted, true = row[3].split("/")
        assert int(predicted) > 0
        assert int(true) > 0
        assert row[4] in ("hint", "history", "prior", *PREDICTED)
        assert row[-1] in ("length", "stop")
    assert " ".join(summary).startswith("8 of 8 requests finished")
    assert "vllm_ext:policy_fallbacks_total{} 0" in table
    url = demo.err.read_text().rpartition("curl ")[2].split()[0]
    with urllib.request.urlopen(url, timeout=HANG_S) as response:
        assert b"vllm_ext:policy_fallbacks_total" in response.read()
    assert len(demo.descendants) >= 2
    assert demo.end(signal.SIGINT) == 0
    assert demo.leftovers() == []


@pytest.mark.full
def test_plain_vllm_has_no_predictions_and_the_demo_ends_by_itself(start: Callable[..., RunningDemo]) -> None:
    demo = start("--requests", "3", "--scheduler-cls", "")
    assert demo.end() == 0, demo.err.read_text()
    *requests, _ = rows(demo.out.read_text())
    assert [row[3].split("/")[0] for row in requests] == ["-"] * 3
    assert "vllm:num_preemptions_total" in demo.out.read_text()
    assert demo.leftovers() == []


@pytest.mark.parametrize(
    ("number", "server", "num_processes"),
    [
        pytest.param(signal.SIGINT, STUBBORN, 1, id="ctrl-c-at-once"),
        pytest.param(signal.SIGTERM, STUBBORN, 2, id="sigterm-while-the-server-starts"),
        # The third process is the engine core: the first is the API server, the second Python's resource tracker.
        pytest.param(signal.SIGTERM, None, 3, id="sigterm-while-the-engine-starts", marks=pytest.mark.full),
    ],
)
def test_signal_during_start_up_stops_the_server(
    start: Callable[..., RunningDemo], number: signal.Signals, server: str | None, num_processes: int
) -> None:
    demo = start("--scheduler-cls", "", server=server)
    demo.wait_for(lambda: len(demo.descendants) >= num_processes)
    assert demo.end(number) == 128 + number
    assert "the server is stopped" in demo.err.read_text()
    assert demo.leftovers() == []


@pytest.mark.parametrize(
    "server", [FAILING, pytest.param(None, marks=pytest.mark.full)], ids=["a program", "vLLM without a model"]
)
def test_server_that_does_not_start_shows_its_log_and_fails(
    start: Callable[..., RunningDemo], server: str | None, tmp_path: Path
) -> None:
    (tmp_path / "no-model").mkdir()
    demo = start("--scheduler-cls", "", "--model", str(tmp_path / "no-model"), server=server)
    assert demo.end() == 3
    message = demo.err.read_text()
    assert "before it answered" in message
    assert "no-model" in message.partition("server.log:\n")[2], "the tail of the log says what is wrong"
    assert demo.out.read_text() == ""
    assert demo.leftovers() == []
