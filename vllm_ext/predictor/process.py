"""Starts the predictor's process, and starts it again when it ended or hangs."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from vllm_ext.config.prediction import PredictorConfig

logger = logging.getLogger("vllm.vllm_ext.predictor")

CANNOT_START = 78
"""Exit status of the process when starting it again would not help."""
TAKEN = 79
"""Exit status of a process that finds another one at its place, where engines share one."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_GRACE_S = 60.0
"""Time to learn what ended last, longer than the process gives itself."""
_LONGEST_PLACE = 64
_STARTING_S = 60.0
"""Age of a socket below which somebody may be about to listen there."""


class WorkerOptions(msgspec.Struct, frozen=True):
    """What the process is told: one JSON text on its command line."""

    socket: str
    folder: str
    parent: int
    """Process id of who started it, with whom it ends."""
    config: dict[str, object]
    """Fields of `PredictorConfig`."""
    shared: bool = False
    """Whether front ends of several engines start it, of which one may."""


class PredictorProcess:
    """One process, and how often it was started. Time is handed in, in seconds of a monotonic clock.

    Args:
        config: Of the predictor.
        folder: Where it keeps what it learned.
        path: Of the socket on which it listens.
        shared: Whether engines of one machine share it: who comes first starts it, and another one when that is gone.
    """

    def __init__(self, config: PredictorConfig, folder: Path, path: Path, *, shared: bool = False) -> None:
        self._config, self._folder, self._socket, self._shared = config, folder, path, shared
        self._process: subprocess.Popen[bytes] | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._not_before = 0.0
        self.starts = 0
        self.given_up = False
        """Whether starting again is known not to help."""

    @property
    def command(self) -> Sequence[str]:
        """What is run."""
        config = self._config.model_dump(mode="json")
        options = WorkerOptions(str(self._socket), str(self._folder), os.getpid(), config, self._shared)
        return [sys.executable, "-m", "vllm_ext.predictor.worker", msgspec.json.encode(options).decode()]

    @property
    def pid(self) -> int | None:
        """Id of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    def ensure(self, now: float) -> None:
        """Start the process unless it runs, is to pause, or was given up. Does not wait."""
        if self._process is not None:
            status = self._process.poll()
            if status is None:
                return
            self._process = None
            self.given_up = status == CANNOT_START
            if status == TAKEN:  # in the moment between a look at the place and its start
                self.starts -= 1
            else:
                logger.info("the length predictor's process ended with status %d", status)  # the client warns, once
            self._rest(now)
        if self.given_up or now < self._not_before:
            return
        try:
            if self._shared and _is_taken(self._socket):
                return
            self.starts += 1
            self._process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, env=self._environment())
        except OSError as error:
            logger.info("the length predictor's process can't be started (%s)", error)
            self._rest(now)

    def works(self) -> None:
        """Note that the process predicted: if it ends now, it is started again after a short pause."""
        self._pause_s = _FIRST_PAUSE_S

    def kill(self) -> None:
        """End a process that hangs."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Let the process learn what ended and end; returns at once, and sees to it beside the caller that it ends."""
        self.given_up = True
        process, self._process = self._process, None
        if process is None:
            if not self._shared:
                remove_socket(self._socket)
            return
        process.terminate()
        threading.Thread(target=self._reap, args=(process,), name="vllm-ext predictor's end", daemon=True).start()

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        remove_socket(self._socket)

    def _rest(self, now: float) -> None:
        self._not_before = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _environment(self) -> dict[str, str]:
        # No CUDA: a context would take memory from the engine. Threads as configured, not one per core.
        # Nothing from the working directory, which `python -m` would put first on the path.
        own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(self._config.threads), "PYTHONSAFEPATH": "1"}
        return {**os.environ, **own}


def socket_path(name: str) -> Path:
    """Return where a predictor of this name listens: in a folder that its process makes for this user alone.

    The name is random, so that two servers never meet, though containers may share the folder of temporary files.
    """
    place = tempfile.gettempdir()
    # A socket's path is short by nature: 107 bytes.
    return Path(place if len(os.fsencode(place)) < _LONGEST_PLACE else "/tmp") / f"vllm-ext-{name}" / "predictor"


def take(path: Path) -> int | None:
    """Take the place of a predictor that is shared; returns what keeps it until it is closed, None: it is taken.

    Raises:
        OSError: the folder is not ours, or can't be made.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if path.parent.lstat().st_uid != os.getuid():
        raise PermissionError(f"{path.parent}: belongs to somebody else")
    held = os.open(path.parent / "lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        return None
    return held


def _is_taken(path: Path) -> bool:
    held = take(path)
    if held is not None:
        os.close(held)
    return held is None


def remove_dead_sockets(place: Path) -> None:
    """Remove the sockets of this user to which nobody listens: vLLM may kill a server with all that it started.

    Args:
        place: The folder of temporary files.
    """
    for path in place.glob("vllm-ext-*/predictor"):
        try:
            status = path.lstat()
            ours = stat.S_ISSOCK(status.st_mode) and status.st_uid == os.getuid()
            if not ours or time.time() - status.st_mtime < _STARTING_S:
                continue
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(1.0)
                probe.connect(str(path))
        except ConnectionRefusedError:
            remove_socket(path)
        except OSError:
            continue


def remove_socket(path: Path) -> None:
    """Remove a socket and its folder, if nothing else is in it."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()
