"""The demo's requests: reproducible, mixed, and honest about what a client can know."""

from __future__ import annotations

from itertools import pairwise

import pytest

from vllm_ext.demo.workload import Kind, make_workload


def test_same_seed_gives_the_same_requests() -> None:
    assert make_workload(20, seed=3) == make_workload(20, seed=3)
    assert make_workload(20, seed=3) != make_workload(20, seed=4)


def test_requests_arrive_in_bursts() -> None:
    gaps = [later.start_s - earlier.start_s for earlier, later in pairwise(make_workload(36, seed=0))]
    assert min(gaps) == 0
    assert max(gaps) > 0


def test_default_workload_is_mixed() -> None:
    requests = make_workload(36, seed=0)
    assert {(request.kind, request.stream) for request in requests} == {(k, s) for k in Kind for s in (True, False)}
    assert {key for request in requests for key in request.hints} == {"osl", "conversation_id", "ttft_slo_ms"}
    assert any(request.stop for request in requests)


def test_a_request_that_ends_at_a_stop_string_carries_no_length() -> None:
    stopped = [request for request in make_workload(200, seed=0) if request.stop]
    assert len({request.max_tokens for request in stopped}) == 1
    assert all("osl" not in request.hints for request in stopped)


def test_no_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="requests=0"):
        make_workload(0, seed=0)
