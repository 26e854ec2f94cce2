"""The demo's client against a server that answers, refuses, or closes kept connections at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vllm_ext.demo.client import send_all
from vllm_ext.demo.workload import DemoRequest, Kind

REFUSED = "refuse this"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked_to_close = self.headers["Connection"].lower() == "close"
        refused = body["prompt"] == REFUSED
        answer = {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 0,
            "model": "demo",
            "choices": [{"index": 0, "text": "x", "finish_reason": "length", "logprobs": None}],
            "usage": {"prompt_tokens": 3, "completion_tokens": body["max_tokens"], "total_tokens": 4},
        }
        payload = json.dumps({"error": {"message": "no"}} if refused else answer).encode()
        self.send_response(400 if refused else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        if asked_to_close:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(payload)
        if not asked_to_close:  # what a server does whose patience ended just now: read on, but never answer
            self.rfile.readline()
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def base_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def request(number: int, prompt: str = "hello", start_s: float = 0.0) -> DemoRequest:
    return DemoRequest(
        number=number, kind=Kind.COMPLETION, stream=False, prompt=prompt, max_tokens=number, start_s=start_s
    )


def test_no_request_rides_on_a_connection_that_the_server_may_close(base_url: str) -> None:
    answers = send_all([request(1), request(2, start_s=0.3)], base_url=base_url, model="demo")
    assert [answer.error for answer in answers] == [None, None]
    assert [answer.output_tokens for answer in answers] == [1, 2]


def test_a_refused_request_says_why_and_the_others_go_on(base_url: str) -> None:
    refused, served = send_all([request(1, REFUSED), request(2)], base_url=base_url, model="demo")
    assert refused.error is not None
    assert "BadRequestError" in refused.error
    assert served.error is None


def test_without_a_server_the_cause_is_named() -> None:
    (answer,) = send_all([request(1)], base_url="http://127.0.0.1:9", model="demo")
    assert answer.error is not None
    assert "APIConnectionError" in answer.error
    assert "ConnectError" in answer.error
