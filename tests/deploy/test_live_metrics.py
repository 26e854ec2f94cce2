"""Prometheus scrapes a server, and every line of the dashboard and every rule is evaluated on what it got."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest
import yaml

from tests.deploy.expressions import RULES, dashboard_expressions
from tests.deploy.prometheus import program
from tests.support.extent import HANG_S
from vllm_ext import tiny_model
from vllm_ext.demo.server import ServerProcess, free_port

SMALL = "--dtype float32 --enforce-eager --max-model-len 512 --block-size 32 --kv-cache-memory-bytes 33554432"
OPTIONS = {
    "slo": {"classes": {"chat": {"ttft_ms": 60_000}}},
    "kv_tier": {"gib": 0.05, "store": "early"},
    "shadow": "fcfs",
}
NOT_HERE = re.compile(r"predictor_|length_predictions|slo_shed|kv_offload_(disk|load)|preemptions_total")
"""Series that begin with what does not happen here: a predictor, a 503, an error, a load, a preemption."""


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Run it with the rules on a target; gives its address."""
    config = {
        "global": {"scrape_interval": "5s", "evaluation_interval": "5s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "vllm", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    listen = f"127.0.0.1:{free_port()}"
    command = [program("prometheus"), f"--config.file={folder / 'prometheus.yml'}", f"--web.listen-address={listen}",
               f"--storage.tsdb.path={folder / 'data'}"]  # fmt: skip
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield f"http://{listen}"
        finally:
            process.terminate()


def get(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, {"Content-Type": "application/json"}), timeout=HANG_S) as answer:
        return json.load(answer)


@pytest.mark.e2e
def test_every_line_and_every_rule_is_evaluated_on_a_server(tmp_path: Path) -> None:
    program("prometheus")
    arguments = [*SMALL.split(), "--served-model-name", "tiny", "--scheduler-cls", "alise", "--max-num-seqs", "1"]
    arguments += ["--additional-config", json.dumps({"vllm_ext": OPTIONS})]
    server = ServerProcess(tiny_model.build(), arguments, log_path=tmp_path / "server", startup_timeout_s=HANG_S)
    ask = {"model": "tiny", "prompt": "a b c " * 20, "n": 3, "max_tokens": 48, "vllm_xargs": {"tag": "chat"}}
    deadline = time.monotonic() + HANG_S
    with server, prometheus(tmp_path, server.base_url.removeprefix("http://")) as address:
        empty = {"": "not asked yet"}
        while empty and time.monotonic() < deadline:
            get(f"{server.base_url}/v1/completions", ask)
            time.sleep(1)
            try:
                empty = {line: text for line, text in dashboard_expressions().items() if not evaluated(address, text)}
            except URLError as error:
                if not isinstance(error.reason, ConnectionRefusedError):
                    raise
            empty = {line: text for line, text in empty.items() if not NOT_HERE.search(text)}
        assert empty == {}
        groups = get(f"{address}/api/v1/rules")["data"]["groups"]
    assert [rule for group in groups for rule in group["rules"] if rule["health"] != "ok"] == []


def evaluated(address: str, expression: str) -> list[Any]:
    """What Prometheus answers now; an expression that it can't read is an HTTP error."""
    found: list[Any] = get(f"{address}/api/v1/query?{urlencode({'query': expression})}")["data"]["result"]
    return found
