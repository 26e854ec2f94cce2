"""Clients that take turns, by the keys they send, on a real server: one that floods it does not hold up another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from forks import ForkServer
from servers import HANG_S, MODEL, Served, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3 * HANG_S)]

FLOOD, TOKENS = 12, 60


def send(server: Served, key: str, prompt: str) -> None:
    server.client().with_options(api_key=key).completions.create(
        model=MODEL, prompt=prompt, max_tokens=TOKENS, extra_body={"ignore_eos": True}
    )


@pytest.mark.parametrize(("system", "most"), [("fair", 2), ("fcfs-tuned", None)])
def test_a_client_that_floods_the_server_waits_behind_itself(
    forks: ForkServer | None, llama: Path, tmp_path: Path, system: str, most: int | None
) -> None:
    """The other's request ends among the first: one of the flood's at most is served before it, beside who runs."""
    log = tmp_path / "requests.jsonl"
    by_key = ["--ext-share-by", "key"] if most is not None else []
    args = ["--scheduler-cls", system, *by_key, "--max-num-seqs", "1", "--ext-request-log", str(log)]
    with (
        Served(llama, args, log_path=tmp_path / "server.log", forks=forks, request_log=log) as server,
        ThreadPoolExecutor(FLOOD + 1) as pool,
    ):
        send(server, "other", "wake up")
        sent = [pool.submit(send, server, "flood", "again and again") for _ in range(FLOOD)]
        wait_until(lambda: server.metric("vllm:num_requests_waiting") >= FLOOD - 4, "a queue")
        served = len(server.records())
        sent.append(pool.submit(send, server, "other", "one two three four five six seven eight nine ten eleven"))
        for one in sent:
            one.result(HANG_S)
        wait_until(lambda: len(server.records()) == FLOOD + 2, "all records")
        prompts = [record["prompt_tokens"] for record in server.records()]
        behind = prompts.index(max(prompts)) - served
        if most is None:
            assert behind >= FLOOD - 4
        else:
            assert behind <= most + 1
            assert server.metric("vllm_ext:sharing_clients") >= 0
