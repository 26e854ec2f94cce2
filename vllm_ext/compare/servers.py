"""The ways to have a server: start one here, talk to one that runs, or let an engine run by a clock."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from vllm_ext import envs
from vllm_ext.compare.replay import sent
from vllm_ext.compare.talk import conversed
from vllm_ext.compare.watch import Watch
from vllm_ext.demo.server import ServerError, ServerProcess
from vllm_ext.simulation.cost.spec import CostSpec, HardwareSpec
from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.spec import WorkloadSpec

API_KEY = "OPENAI_API_KEY"
"""Variable with the key that the client of ``vllm bench serve`` sends, so that all that we ask has the same."""
_LOG_LINES = 30


@dataclass(frozen=True)
class Row:
    """A server that is compared."""

    name: str
    flags: tuple[str, ...] = ()
    """Of `vllm serve`, beside those of all."""
    url: str = ""
    """Of one that runs already."""
    tune: bool = False
    """Whether the best of vLLM's own flags are searched for it."""


class Server(Protocol):
    """One that is up."""

    max_model_len: int

    def serve(self, workload: WorkloadSpec) -> dict[str, Any]:
        """Send the requests of a workload at their times; return what `replay.observed` reads.

        Raises:
            ServerError: It is gone.
        """
        ...


class Backend(Protocol):
    """Where servers come from."""

    def started(self, row: Row) -> contextlib.AbstractContextManager[Server]:
        """Have a server up for as long as the context lasts; a `ServerError` says why it is not."""
        ...


@dataclass
class _Http:
    """A server that is asked over HTTP."""

    url: str
    model: str
    max_model_len: int
    forced: bool
    log_path: Path
    process: ServerProcess | None = None

    def serve(self, workload: WorkloadSpec) -> dict[str, Any]:
        made = build(workload)
        with self.log_path.open("a", encoding="utf-8") as log, Watch(self.url) as watch:
            if made.source.mean_turns > 1:
                found = conversed(self.url, self.model, made, forced=self.forced)
            else:
                found = sent(self.url, self.model, list(made.start()), forced=self.forced, log=log)
        if self.process is not None and not self.process.is_running():
            raise ServerError(f"the server ended while it served; its last lines:\n{self.process.log_tail()}")
        if self.process is None:
            served_model(self.url)  # who is gone has not failed these requests, and they are sent again once it is back
        return {**found, "timeline": watch.timeline.kept()}


@dataclass
class Up:
    """The one server that is up: whoever wants the same finds it so, whoever wants another has it stopped first."""

    backend: Backend
    made: int = 0
    """Runs that were served."""
    _row: Row | None = None
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _server: Server | None = None

    def server(self, row: Row) -> Server:
        """Return a server that is up.

        Raises:
            ServerError: It did not start.
        """
        if self._server is None or self._row != row:
            self.stop()
            self._server, self._row = self._stack.enter_context(self.backend.started(row)), row
        return self._server

    def stop(self) -> None:
        """Stop it, where one is up."""
        self._server = self._row = None
        self._stack.close()


@dataclass(frozen=True)
class Here:
    """Starts `vllm serve` on this machine."""

    model: str
    flags: Sequence[str]
    folder: Path
    """Gets the logs."""

    @contextlib.contextmanager
    def started(self, row: Row) -> Iterator[Server]:
        """See `Backend`."""
        log = self.folder / f"{row.name}.log"
        env = {envs.BENCH_FORCED_LENGTH: "1"}
        with ServerProcess(self.model, [*self.flags, *row.flags], log_path=log, env=env) as process:
            name, length = served_model(process.base_url)
            yield _Http(process.base_url, name, length, True, self.folder / f"{row.name}.client.log", process)


@dataclass(frozen=True)
class There:
    """Servers that run already."""

    folder: Path

    @contextlib.contextmanager
    def started(self, row: Row) -> Iterator[Server]:
        """See `Backend`."""
        name, length = served_model(row.url)
        yield _Http(row.url, name, length, False, self.folder / f"{row.name}.client.log")


def served_model(url: str) -> tuple[str, int]:
    """Return the name of the model that a server serves, and its context; asked with the key that requests carry.

    Raises:
        ServerError: It does not answer, or is no server of a model.
    """
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(API_KEY)) else {}
    try:
        request = urllib.request.Request(f"{url}/v1/models", headers=headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            (first, *_) = json.load(response)["data"]
            return str(first["id"]), int(first.get("max_model_len") or 2**31)
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise ServerError(f"{url}/v1/models: {' '.join(str(error).split())}") from error


@dataclass(frozen=True)
class Clocked:
    """Engines in processes of their own, by a clock on which steps take what a cost model says; see `clocked`."""

    model: str
    flags: Sequence[str]
    folder: Path
    hardware: HardwareSpec
    cost: CostSpec
    noise: float = 0.0
    """Standard deviation of the logarithm of a step's time."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Of the processes, beside this one's."""

    @contextlib.contextmanager
    def started(self, row: Row) -> Iterator[Server]:
        """See `Backend`."""
        log_path = self.folder / f"{row.name}.log"
        with log_path.open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "vllm_ext.compare.clocked"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True, env={**os.environ, **self.env},
            )  # fmt: skip
        with process:
            try:
                flags = ["--model", self.model, *self.flags, *row.flags]
                first = {
                    "flags": flags,
                    "hardware": self.hardware.model_dump(),
                    "cost": self.cost.model_dump(),
                    "noise": [self.noise, row.name],
                }
                talk = _Talk(process, log_path)
                talk.max_model_len = talk.answer(first)["max_model_len"]
                yield talk
            finally:
                process.kill()


@dataclass
class _Talk:
    """An engine by a clock, which is told over pipes."""

    process: subprocess.Popen[str]
    log_path: Path
    max_model_len: int = 0

    def serve(self, workload: WorkloadSpec) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="vllm-ext-compare-") as folder:
            out = Path(folder, "out.json")
            self.answer({"workload": workload.model_dump(mode="json"), "out": str(out)})
            found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            return found

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(asked), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        if not line:
            tail = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
            raise ServerError("\n".join(["the engine ended; its last lines:", *tail]))
        found: dict[str, Any] = json.loads(line)
        return found
