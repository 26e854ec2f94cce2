"""From a server that runs to an answer: its request log, a plan made of it, and a comparison on the same requests."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from forks import ForkServer
from servers import HANG_S, MAX_MODEL_LEN, MODEL, SMALL_ENGINE, Served, wait_until

from vllm_ext.cli import compare, plan
from vllm_ext.compare import rounds

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(3 * HANG_S)]

REQUESTS = 64
SEATS = ("--max-num-seqs", "4")


async def _ask(server: Served) -> None:
    """Send prompts and outputs of mixed lengths, some seats' worth at a time."""
    gate, client = asyncio.Semaphore(12), server.async_client()

    async def one(number: int) -> None:
        async with gate:
            words, tokens = 2 + 11 * number % 50, 2 + 7 * number % 40
            await client.completions.create(model=MODEL, prompt="so " * words, max_tokens=tokens)

    await asyncio.gather(*map(one, range(REQUESTS)))


def test_what_a_server_logs_is_planned_with_and_compared(
    forks: ForkServer | None, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One repeat of the comparison is enough here: each engine takes as long to start as all of its requests."""
    monkeypatch.setattr(rounds, "LEAST_REPEATS", 1)
    log = tmp_path / "requests.jsonl"
    args = ["--scheduler-cls", "fcfs", "--ext-request-log", str(log), "--ext-metrics-interval-s", "0.2", *SEATS]
    with Served(llama, args, log_path=tmp_path / "server.log", forks=forks) as server:
        asyncio.run(_ask(server))
        wait_until(lambda: len(log.read_text().splitlines()) == REQUESTS, "the records of all requests")
        assert 0 <= server.metric("vllm_ext:load_waiting_share") <= 1
    records = [json.loads(line) for line in log.read_text().splitlines()]

    saved = tmp_path / "tuned.json"
    device = ["--model", "llama-3.1-8b", "--device", "h100", "--max-model-len", str(MAX_MODEL_LEN)]
    assert plan.main(["--trace", str(log), *device, "--jobs", "1", "--save", str(saved)]) == 0
    assert json.loads(capsys.readouterr().out)["workload"]["rows"] == REQUESTS
    assert json.loads(saved.read_text())

    out = tmp_path / "compared.json"
    flags = [*SMALL_ENGINE, *SEATS]
    status = compare.main([
        str(llama), "--clock", "engine", "--trace", str(log), "--requests", "30", "--loads", "1", "--precision", "9",
        "--cells", str(tmp_path / "cells"), "--out", str(out), "--", *flags,
    ])  # fmt: skip
    said = capsys.readouterr().err
    assert status in (0, 1), said
    assert re.search(r"alise at 1 \(.* requests/s\): (better|worse|no difference seen)", said)
    result = json.loads(out.read_text())
    assert result["workload"]["rows"] == REQUESTS
    lengths = sorted((record["prompt_tokens"], record["output_tokens"]) for record in records)
    served = [json.loads(path.read_text()) for path in (tmp_path / "cells").glob("upstream-*.json")]
    (first, *_) = [one["run"] for one in served if one["workload"]["num_requests"] == 30 and "errors" in one["run"]]
    assert set(zip(first["input_lens"], first["output_lens"], strict=True)) <= set(lengths)
