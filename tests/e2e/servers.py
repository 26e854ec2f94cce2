"""A served tiny model as the tests see it: clients, metrics, and the text of what went wrong."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import openai
import turnstile
from forks import ENVIRONMENT, HANG_S, VLLM, ForkServer, start
from prometheus_client.parser import text_string_to_metric_families

from vllm_ext.demo.client import OWN_CONNECTION
from vllm_ext.demo.server import ServerProcess

HERE = Path(__file__).parent
MODEL = "tiny"
"""Name under which every server of these tests serves its model."""

MAX_MODEL_LEN = 512

SMALL_ENGINE = (
    "--served-model-name",
    MODEL,
    "--dtype",
    "float32",
    "--enforce-eager",
    "--max-model-len",
    str(MAX_MODEL_LEN),
    "--block-size",
    "32",
    "--kv-cache-memory-bytes",
    str(32 * 2**20),
    "--uvicorn-log-level",
    "warning",
)


class Served(ServerProcess):
    """A `vllm serve` of a tiny model with the OpenAI clients' view of it."""

    def __init__(
        self,
        model: Path,
        args: Sequence[str] = (),
        *,
        log_path: Path,
        forks: ForkServer | None = None,
        request_log: Path | None = None,
        env: Mapping[str, str] | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        """Remember what to start; nothing runs yet.

        Args:
            model: Folder of the model.
            args: Further arguments of `vllm serve`.
            log_path: File for the server's output.
            forks: What to fork the server from; without it, the server is started as users start it.
            request_log: File that the arguments make the server write.
            env: Further variables of its environment.
            modules: Modules beside this one that its engine imports; with `turnstile` among them it goes by
                ``self.turnstile``.
        """
        self.turnstile = turnstile.Turnstile(log_path.with_name("turnstile"))
        env = dict(env or {})
        if modules:
            args = [*args, "--ext-modules", ",".join(modules)]
            env |= {"PYTHONPATH": str(HERE), turnstile.VARIABLE: str(self.turnstile.file)}
        super().__init__(
            model,
            [*SMALL_ENGINE, *args],
            log_path=log_path,
            env={**ENVIRONMENT, **env},
            startup_timeout_s=HANG_S,
            stop_grace_s=HANG_S,
        )
        self.request_log = request_log
        self.forks = forks

    def _spawn(self) -> subprocess.Popen[bytes]:
        started = start(self.forks, VLLM, self.command, environment=self._environment(), log=self.log_path)
        return cast("subprocess.Popen[bytes]", started)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(**self._client_options())

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._client_options())

    def _client_options(self) -> dict[str, Any]:
        return {
            "base_url": f"{self.base_url}/v1",
            "api_key": "none",
            "max_retries": 0,
            "timeout": HANG_S,
            "default_headers": OWN_CONNECTION,
        }

    def samples(self) -> list[tuple[str, dict[str, str], float]]:
        """Every sample of ``/metrics`` as (name, labels, value)."""
        families = text_string_to_metric_families(self.get("/metrics", timeout_s=HANG_S))
        return [(s.name, dict(s.labels), s.value) for family in families for s in family.samples]

    def our_series(self) -> list[tuple[str, tuple[tuple[str, str], ...]]]:
        """Name and labels of every sample of vllm-ext in ``/metrics``."""
        return [(n, tuple(sorted(labels.items()))) for n, labels, _ in self.samples() if n.startswith("vllm_ext:")]

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples called ``name`` whose labels include ``labels``.

        Raises:
            LookupError: There is no such sample.
        """
        samples = self.samples()
        found = [value for n, have, value in samples if n == name and labels.items() <= have.items()]
        if not found:
            raise LookupError(f"no {name} {labels} among {sorted({n for n, _, _ in samples})}")
        return sum(found)

    def wait_for_queue(self, requests: int) -> None:
        """Return once so many requests wait in the engine for their turn."""
        waiting = lambda: self.metric("vllm_ext:num_requests_waiting") == requests  # noqa: E731
        wait_until(waiting, f"{requests} requests in the engine's queue")

    def records(self) -> list[dict[str, Any]]:
        """The request log so far; a last line that is still being written is left out."""
        if self.request_log is None or not self.request_log.exists():
            return []
        lines = self.request_log.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Return once the condition holds; a metric that is not there yet counts as not holding.

    Raises:
        TimeoutError: It did not within ``HANG_S``.
    """
    deadline = time.monotonic() + HANG_S
    missing = ""
    while True:
        try:
            if condition():
                return
        except LookupError as error:
            missing = f" ({error})"
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {HANG_S} s still not: {what}{missing}")
        time.sleep(0.1)
