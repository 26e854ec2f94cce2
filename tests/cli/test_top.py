"""`vllm-ext top`: what it reads of two moments of a server, and what it says where there is none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from vllm_ext.cli import top
from vllm_ext.cli.top import Between
from vllm_ext.report.scraped import Snapshot

BEFORE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3
vllm:num_requests_running{engine="1"} 4
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 9
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.5
# TYPE vllm:request_success counter
vllm:request_success_total{finished_reason="stop"} 10
vllm:request_success_total{finished_reason="length"} 2
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_count 10
vllm:time_to_first_token_seconds_sum 20
"""
OURS = """\
# TYPE vllm_ext:system_info gauge
vllm_ext:system_info{system="alise"} 1
# TYPE vllm_ext:slo_requests counter
vllm_ext:slo_requests_total{tier="chat",objective="all",outcome="met"} 3
vllm_ext:slo_requests_total{tier="chat",objective="all",outcome="missed"} 1
vllm_ext:slo_requests_total{tier="chat",objective="ttft",outcome="missed"} 1
# TYPE vllm_ext:kv_tier_used_bytes gauge
vllm_ext:kv_tier_used_bytes{tier="host"} 1073741824
# TYPE vllm_ext:kv_tier_capacity_bytes gauge
vllm_ext:kv_tier_capacity_bytes{tier="host"} 4294967296
# TYPE vllm_ext:policy_fallbacks counter
vllm_ext:policy_fallbacks_total 2
"""


def shown(before: str, now: str, seconds: float = 2.0) -> dict[str, str]:
    return dict(top.lines(Between(Snapshot.parsed(before, 10.0), Snapshot.parsed(now, 10.0 + seconds))))


def test_rates_and_means_are_of_what_happened_between() -> None:
    now = BEFORE.replace('"stop"} 10', '"stop"} 15').replace("_count 10", "_count 14").replace("_sum 20", "_sum 21")
    found = shown(BEFORE, now)
    assert found["requests"] == "running 7   waiting 9   KV used 50 %"
    assert found["served"].startswith("2.5 requests/s")
    assert found["mean latency"] == "TTFT 250 ms   TBT -   e2e -"


def test_of_a_stock_server_nothing_of_ours_is_shown() -> None:
    assert set(shown(BEFORE, BEFORE)) == {"requests", "served", "mean latency"}


def test_what_is_ours_is_shown_where_it_is() -> None:
    found = shown(BEFORE + OURS, BEFORE + OURS)
    assert found["system"] == "alise"
    assert found["objectives met"] == "chat: 75 % of 4"
    assert found["KV tier"] == "host: 1.0 of 4.0 GiB"
    assert found["policy failed"] == "2 steps were first come, first served"


@pytest.fixture
def url() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write((BEFORE + OURS).encode() if self.path == "/metrics" else b"")

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_server_is_shown(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main([url, "--times", "1", "--every", "0.1"]) == 0
    assert "running 7" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (["http://127.0.0.1:1"], 3, "http://127.0.0.1:1/metrics: "),
        (["x"], 3, "x/metrics: "),
        (["http://127.0.0.1:1", "--every", "0"], 2, "0: must be seconds from 0.1 to 3600"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    flags: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found = top.main(flags)
    except SystemExit as error:
        found = error.code if isinstance(error.code, int) else 0
    assert found == status
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1
