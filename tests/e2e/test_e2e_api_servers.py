"""Several API servers before an engine with several workers: nothing is counted, or predicted, twice."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from forks import ForkServer
from predicting import asked, begin_when, complete, options, predictor_log, up, worker_pid
from servers import HANG_S, MODEL, Served, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(3 * HANG_S)]


@pytest.fixture(scope="module")
def server(forks: ForkServer | None, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two API servers, which vLLM spawns always, and two tensor-parallel workers."""
    folder = tmp_path_factory.mktemp("several")
    args = [*options(folder / "predictor"), "--api-server-count", "2", "--tensor-parallel-size", "2"]
    with Served(llama, args, log_path=folder / "server.log", forks=forks, modules=["turnstile"]) as running:
        yield running


def together(server: Served, num: int, max_tokens: int) -> list[int]:
    """Each client connects anew, so that both front ends get some requests."""
    with ThreadPoolExecutor(max_workers=num) as pool:
        return list(pool.map(lambda i: complete(server, f"hello {i}", max_tokens), range(num)))


def test_two_api_servers_report_our_metrics_once(server: Served) -> None:
    """Both front ends fetch the same scheduler's state; neither may add its copy to the other's.

    The first test here: it counts every request there was.
    """
    assert together(server, 12, 3) == [3] * 12
    wait_until(lambda: len(server.our_series()) > 0, "vllm_ext:* in /metrics")
    wait_until(lambda: server.metric("vllm_ext:output_tokens_count") >= 12, "every request in our metrics")
    for _ in range(6):  # whichever front end answers
        ours = server.our_series()
        assert len(ours) == len(set(ours))
        assert not any("pid" in dict(labels) for _, labels in ours)
        assert server.metric("vllm_ext:output_tokens_count") == 12
        assert server.metric("vllm_ext:system_info") == 1


def test_api_servers_share_one_predictor_and_tensor_parallel_workers_have_none(server: Served) -> None:
    """What one front end's requests teach is known to all."""
    wait_until(lambda: complete(server, "anybody?", 2) == 2 and up(server), "the predictor ready")
    hello = {f"hello {i}" for i in range(16)}
    (answers,) = begin_when(server, lambda: hello <= set(asked(server)), lambda: together(server, 16, 20))
    assert answers == [20] * 16
    assert server.metric("vllm_ext:predictor_starts_total") == 1
    assert worker_pid(server)
    wait_until(
        lambda: sum(entry.get("finished") in hello for entry in predictor_log(server)) == 28, "all of them learned"
    )


def test_a_request_that_its_client_gives_up_is_learned_as_such(server: Served) -> None:
    """Clients give up what is long: a predictor that never heard of them took everything for short."""

    def learned() -> list[Any]:
        return [entry for entry in predictor_log(server) if str(entry.get("finished")).startswith("never mind")]

    with (
        server.turnstile.closed(),
        server.client().completions.create(
            model=MODEL, prompt="never mind", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        ) as answer,
    ):
        server.wait_for_queue(1)
        server.turnstile.let(3)
        next(iter(answer))
        answer.close()
        wait_until(lambda: len(learned()) == 1, "it to be learned")
    (entry,) = learned()
    assert entry["aborted"]
    assert 1 <= entry["tokens"] < 400
