"""Starts the predictor's process, and starts it again when it ended or hangs."""

from __future__ import annotations

import contextlib
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


class PredictorProcess:
    """One process, and how often it was started. Time is handed in, in seconds of a monotonic clock."""

    def __init__(self, config: PredictorConfig, folder: Path, path: Path) -> None:
        self._config, self._folder, self._socket = config, folder, path
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
        options = WorkerOptions(str(self._socket), str(self._folder), os.getpid(), config)
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
            logger.info("the length predictor's process ended with status %d", status)  # the client warns, once
            self._rest(now)
        if self.given_up or now < self._not_before:
            return
        self.starts += 1
        try:
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
