"""Starts the predictor's process, and starts it again when it ended or answers nothing any more."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from vllm_ext.config import PredictorConfig
from vllm_ext.prediction.service.worker_options import CANNOT_START, WorkerOptions

logger = logging.getLogger("vllm.vllm_ext.predictor")

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_GRACE_S = 40.0
"""Time to save, longer than the process gives itself."""


class PredictorProcess:
    """One process, and how often it was started. Time is handed in, in seconds of a monotonic clock."""

    def __init__(self, config: PredictorConfig, folder: Path, socket: Path) -> None:
        options = WorkerOptions(socket=str(socket), folder=str(folder), config=msgspec.to_builtins(config))
        self._options = msgspec.json.encode(options).decode()
        self._threads = config.threads
        self._process: subprocess.Popen[bytes] | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._not_before = 0.0
        self.starts = 0
        self.given_up = False
        """Whether starting again is known not to help."""

    @property
    def command(self) -> Sequence[str]:
        """What is run."""
        return [sys.executable, "-m", "vllm_ext.prediction.service.worker", self._options]

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
            _let_go(self._process)
            self._process = None
            if status == CANNOT_START:
                self.given_up = True
            else:  # who is connected to it warns, once
                logger.info("the length predictor's process ended with status %d", status)
            self._not_before = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        if self.given_up or now < self._not_before:
            return
        self.starts += 1
        try:
            # Its standard input is how it learns that we are gone, however we go.
            self._process = subprocess.Popen(self.command, stdin=subprocess.PIPE, env=self._environment())
        except OSError as error:
            self._not_before = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            logger.info("the length predictor's process can't be started (%s)", error)

    def works(self) -> None:
        """Note that the process answered: if it ends now, it is started again after a short pause."""
        self._pause_s = _FIRST_PAUSE_S

    def kill(self) -> None:
        """End a process that answers nothing any more."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Let the process save and end; returns at once, and sees to it beside the caller that it does end."""
        self.given_up = True
        process, self._process = self._process, None
        if process is None:
            return
        _let_go(process)
        process.terminate()  # a process forked from this one holds the input's other end as well
        threading.Thread(target=_reap, args=(process,), name="vllm-ext predictor's end", daemon=True).start()

    def _environment(self) -> dict[str, str]:
        # No CUDA: a context would take memory from the engine. Threads as configured, not one per core.
        # Nothing from the working directory, which `python -m` would put first on the path.
        own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(self._threads), "PYTHONSAFEPATH": "1"}
        return {**os.environ, **own}


def _let_go(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()


def _reap(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
