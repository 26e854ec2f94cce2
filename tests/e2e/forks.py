"""Commands, each in a process of its own or in a fork of a process that has imported vLLM; see `fork_server`."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_ext.demo.server import group_members

ENVIRONMENT: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",  # more threads spin on barriers for most of the time where other tests use the cores too
    "NUMBA_NUM_THREADS": "1",  # which it tells OpenMP as well, so that PyTorch has as many
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines running side by side would all bind to the same core
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Environment of every engine of these tests, on top of the present one."""

HANG_S = 600.0
"""What nothing here takes, whatever else the machine does. No verdict depends on how long something took."""

TIDY_S = 10.0
"""What a command's other processes have to end by themselves: Python's resource tracker removes shared memory then."""

VLLM = "vllm.entrypoints.cli.main:main"
"""What the `vllm` command calls."""

SCRIPT = Path(__file__).with_name("fork_server.py")


class Fork:
    """A command in a fork, with what `subprocess.Popen` has of it; it leads a session and process group."""

    def __init__(self, answer: int) -> None:
        self._answer = answer
        self._told = b""
        self.returncode: int | None = None
        self.pid = self._number(None)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = self._number(timeout)
            os.close(self._answer)
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def _number(self, timeout: float | None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._told:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._answer], [], [], left)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            more = os.read(self._answer, 64)
            if not more:
                raise RuntimeError("the process forked from has ended")
            self._told += more
        line, _, self._told = self._told.partition(b"\n")
        return int(line)


class ForkServer:
    """The process forked from."""

    def __init__(self, log: Path) -> None:
        """Start it; its own output, before any fork, goes to ``log``."""
        self._log = log
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-u", str(SCRIPT), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT},
                start_new_session=True,  # Ctrl-C is for the tests, which stop their servers then
            )

    def start(self, entry: str, argv: Sequence[str], *, environment: Mapping[str, str], log: Path) -> Fork:
        """Start a command in a fork.

        Args:
            entry: What the command's console script calls, as ``module:function``.
            argv: The command line; an interpreter that it starts with is left out.
            environment: All of it.
            log: File for its output, overwritten.

        Raises:
            RuntimeError: There is no process to fork from any more; the message ends with its log.
        """
        own = argv[1:] if argv[0] == sys.executable else argv
        job = json.dumps({"entry": entry, "argv": list(own), "environment": dict(environment)})
        answer, theirs = os.pipe()
        try:
            with log.open("wb") as output:
                socket.send_fds(self._control, [job.encode()], [output.fileno(), theirs])
            os.close(theirs)
            return Fork(answer)
        except (OSError, RuntimeError) as error:
            raise RuntimeError(f"no fork of vLLM's process:\n{self._log.read_text(errors='replace')}") from error

    def close(self) -> None:
        """End the process; forks that are still running go on."""
        self._control.close()
        self._process.wait()


def start(
    forks: ForkServer | None, entry: str, argv: Sequence[str], *, environment: Mapping[str, str], log: Path
) -> Fork | subprocess.Popen[bytes]:
    """Start a command, in a process of its own if there is nothing to fork from; see `ForkServer.start`."""
    if forks is not None:
        return forks.start(entry, argv, environment=environment, log=log)
    with log.open("wb") as sink:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that ran to its end."""

    code: int
    output: str


def run(
    forks: ForkServer | None, entry: str, argv: Sequence[str], *, environment: Mapping[str, str], log: Path
) -> Ended:
    """Run a command to its end, and end whatever it started; see `start`."""
    process = start(forks, entry, argv, environment=environment, log=log)
    try:
        code = process.wait(timeout=HANG_S)
        deadline = time.monotonic() + TIDY_S
        while group_members(process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Ended(code=code, output=log.read_text(errors="replace"))
