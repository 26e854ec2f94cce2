"""Servers that run already, and what answers in their place."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.compare import servers
from vllm_ext.compare.servers import Row, There, served_model
from vllm_ext.demo.server import ServerError
from vllm_ext.report.scraped import scraped
from vllm_ext.simulation.workloads.spec import WorkloadSpec

KEY = "sk-1"


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.wfile.write(b"SSH-2.0-OpenSSH_9\r\n")
            return
        self.send_response(200 if self.headers["Authorization"] == f"Bearer {KEY}" else 401)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "llama", "max_model_len": 512}]}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    """A server that wants a key."""
    monkeypatch.setenv(servers.API_KEY, KEY)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def url_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def test_a_server_is_asked_with_the_key_that_requests_carry(
    there: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served_model(url_of(there)) == ("llama", 512)
    monkeypatch.delenv(servers.API_KEY)
    with pytest.raises(ServerError, match="/v1/models: HTTP Error 401"):
        served_model(url_of(there))


@pytest.mark.parametrize("url", ["http://127.0.0.1:x", "http://127.0.0.1:80 80", "127.0.0.1:80", "http://127.0.0.1:1"])
def test_what_is_no_address_of_a_server_is_told_in_a_line(url: str) -> None:
    with pytest.raises(ServerError, match=f"^{url}/v1/models: .+$"):
        served_model(url)


def test_what_speaks_no_http_has_no_metrics(there: ThreadingHTTPServer) -> None:
    with pytest.raises(OSError, match="OpenSSH"):
        scraped(url_of(there))


def test_a_run_at_whose_end_the_server_is_gone_is_none(
    there: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests failed; kept as a run, these failures would be counted against the server once it is back."""
    ends = False

    def sent(*_: object, **__: object) -> dict[str, Any]:
        if ends:
            there.shutdown()
            there.server_close()
        return {"errors": ["", "refused"]}

    monkeypatch.setattr(servers, "sent", sent)
    workload = WorkloadSpec(source="fixed:20:8", num_requests=2)
    with There(tmp_path).started(Row("A", url=url_of(there))) as server:
        assert server.serve(workload)["errors"] == ["", "refused"]
        ends = True
        with pytest.raises(ServerError, match="/v1/models: "):
            server.serve(workload)
