"""Start a stock `vllm serve`, wait until it answers, and stop everything it started."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"

_POLL_S = 0.25
_KILL_WAIT_S = 10.0


class ServerError(RuntimeError):
    """The server did not start or is gone; the message ends with the tail of its log."""


class ServerProcess:
    """A `vllm serve` of this environment in its own process group; a context manager.

    Entering starts the server and waits until `/health` answers; leaving stops every process of the group, also when
    start-up was interrupted. Its output goes to `log_path`.
    """

    def __init__(
        self,
        model: str | Path,
        args: Sequence[str] = (),
        *,
        log_path: str | Path,
        env: Mapping[str, str] | None = None,
        port: int = 0,
        startup_timeout_s: float = 240.0,
        stop_grace_s: float = 15.0,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """Remember what to start; nothing runs yet.

        Args:
            model: Model directory or name, as `vllm serve` takes it.
            args: Further arguments of `vllm serve`, without model, host and port.
            log_path: File for the server's output; it is overwritten.
            env: Variables set in addition to this process's environment.
            port: Port to listen on; 0 takes a free one.
            startup_timeout_s: Longest wait for `/health`.
            stop_grace_s: Wait after SIGTERM before the group is killed.
            on_progress: Called with the seconds waited so far, about once a second, while the server starts.
        """
        self.model = str(model)
        self.log_path = Path(log_path)
        self.port = port or free_port()
        self._args = [str(arg) for arg in args]
        self._env = dict(env or {})
        self._startup_timeout_s = startup_timeout_s
        self._stop_grace_s = stop_grace_s
        self.on_progress = on_progress
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def base_url(self) -> str:
        """`http://host:port`, without a path."""
        return f"http://{HOST}:{self.port}"

    @property
    def command(self) -> list[str]:
        """The command line that is run: the `vllm` installed beside this Python."""
        vllm = Path(sys.executable).with_name("vllm")
        start = [str(vllm)] if vllm.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
        return [*start, "serve", self.model, "--host", HOST, "--port", str(self.port), *self._args]

    @property
    def pid(self) -> int:
        """Process and process-group id of the server.

        Raises:
            ServerError: It was not started.
        """
        if self._process is None:
            raise ServerError(f"vllm serve {self.model} was not started")
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            ServerError: It exited or did not answer in time; nothing of it is left running.
        """
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with _interruptions_deferred():
                self._process = self._spawn()
            self._wait_until_healthy()
        except BaseException:  # KeyboardInterrupt too: a server that is half started must not stay
            self.stop()
            raise

    def stop(self) -> None:
        """Stop all processes of the server's group: SIGTERM, a grace period, SIGKILL. A second call does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.terminate()
            _wait_for_end(process, self._stop_grace_s)
        finally:  # also when the wait is interrupted: a second Ctrl-C means "at once"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            # a killed process ends when it is next scheduled, and only the first one can be waited for
            _wait_for_end(process, _KILL_WAIT_S)

    def is_running(self) -> bool:
        """Whether the server's first process is alive."""
        return self._process is not None and self._process.poll() is None

    def get(self, path: str, timeout_s: float = 10.0) -> str:
        """Return the body of `GET path` as text.

        Raises:
            OSError: No answer, or a status that is an error (`urllib.error.HTTPError`).
        """
        with urllib.request.urlopen(f"{self.base_url}{path}", timeout=timeout_s) as response:
            body: bytes = response.read()
            return body.decode()

    def log_tail(self, num_lines: int = 40) -> str:
        """Return the last lines of the log, or the empty string when there is none."""
        try:
            lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        return "\n".join(lines[-num_lines:])

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self.log_path.open("wb") as log:
            return subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        """Unbuffered, so that the log tells all when the server dies."""
        return {**os.environ, "PYTHONUNBUFFERED": "1", **self._env}

    def _wait_until_healthy(self) -> None:
        start = time.monotonic()
        next_report = 1.0
        while (waited := time.monotonic() - start) < self._startup_timeout_s:
            if not self.is_running():
                code = self._process.returncode if self._process is not None else None
                raise ServerError(self._failure(f"exited with code {code} before it answered"))
            if self._answers():
                return
            if self.on_progress is not None and waited >= next_report:
                self.on_progress(waited)
                next_report = waited + 1.0
            time.sleep(_POLL_S)
        raise ServerError(self._failure(f"did not answer within {self._startup_timeout_s:g} s"))

    def _answers(self) -> bool:
        try:
            self.get("/health", timeout_s=2.0)
        except (OSError, http.client.HTTPException):  # refused, reset, timed out, or not ready (503)
            return False
        return True

    def _failure(self, what: str) -> str:
        return f"vllm serve {self.model} {what}; the end of {self.log_path}:\n{self.log_tail()}"


@contextlib.contextmanager
def _interruptions_deferred() -> Iterator[None]:
    """Let signals with Python handlers wait for the end of the block, so that none leaves its work half done.

    A handler that raises while a process is being started would leave nobody who knows of that process.
    """
    caught: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread():  # which alone runs handlers and may set them
        handlers = {}
    for deferred in handlers:
        signal.signal(deferred, lambda got, _: caught.append(got))
    try:
        yield
    finally:
        for deferred, handler in handlers.items():
            signal.signal(deferred, handler)
        for number in caught:
            signal.raise_signal(number)


def _wait_for_end(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Wait until no process of a group runs any more, or the time is over."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and (process.poll() is None or group_members(process.pid)):
        time.sleep(_POLL_S)


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def group_members(group: int) -> list[int]:
    """Return the ids of the processes in a process group, those left out that ended but were not waited for."""
    import psutil  # type: ignore[import-untyped]  # comes with vLLM; not needed to import this module

    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
    return members
