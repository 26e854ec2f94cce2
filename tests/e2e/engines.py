"""Offline engines for the equality tests: request scripts, and their results from a process of their own."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("engine_script.py")
ENVIRONMENT: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",  # more threads spin on barriers for most of the time where other tests use the cores too
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines running side by side would all bind to the same core
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Environment of every engine of these tests, on top of the present one."""

BASE_ENGINE: Mapping[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "block_size": 32,
    "seed": 0,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 32 * 2**20,
}
"""float32, because bfloat16 on a CPU gives other tokens alone than in a batch, with any scheduler.

32 MiB of KV are room for everything here. Given in bytes, because vLLM otherwise wants nearly all of the machine's
memory to be free, and walks through the many blocks it makes of it.
"""

EAGER: Mapping[str, Any] = {
    "vllm_ext": {"admission": {"gain_ratio": 1e-9}, "prediction": {"sources": ["hint", "history"]}}
}
"""Options with which alise preempts for anything that ranks better, not only where it pays; without the predictor's
process, which would be one more of them for every engine (`test_e2e_prediction` has it).

Servers see that by the step times they measure, and so by what else the machine does; these tests are of what a
preemption does to the output.
"""

SEATS: Mapping[str, Any] = {"max_num_seqs": 3}
"""Plenty of KV blocks but three seats: upstream never preempts here, so every preemption is a decision of ours."""

TIGHT: Mapping[str, Any] = {"max_num_seqs": 4, "num_gpu_blocks_override": 11}
"""Fewer blocks than the long requests need together: upstream's own preemptions come on top."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run of a request script gave; see `engine_script.run`."""

    tokens: dict[str, list[int]]
    texts: dict[str, str]
    finish_reasons: dict[str, str]
    preemptions: float
    preemption_reasons: dict[str, int]
    fallbacks: int
    gaps: dict[str, int]
    """What was done about gaps in kept KV; empty where they are not crossed."""
    drafts: float
    host_hit_tokens: float
    """Prompt tokens whose KV came from host memory; vLLM does not count those of preempted requests."""
    host_bytes_stored: float
    host_bytes_loaded: float
    scheduler: str
    batch_queue: int
    runner: str
    blocks_missing: int
    left_running: int
    left_waiting: int


def arrival(
    req_id: str, step: int, prompt: list[int], max_tokens: int, *, osl: int | None = None, **sampling: Any
) -> dict[str, Any]:
    """One request; ``osl`` is the length hint, which need not tell the truth."""
    extra = {} if osl is None else {"extra_args": {"osl": osl}}
    sampling = {"max_tokens": max_tokens, "ignore_eos": True, **extra, **sampling}
    return {"id": req_id, "step": step, "prompt_token_ids": prompt, "sampling": sampling}


def long_then_short(
    seed: int, *, num_long: int = 4, num_short: int = 6, long_tokens: int = 100, short_tokens: int = 6, **sampling: Any
) -> list[dict[str, Any]]:
    """Long requests that fill the engine, then short ones that a shortest-first system lets in before them."""
    rng = random.Random(seed)

    def prompt() -> list[int]:
        return [rng.randrange(32, 127) for _ in range(rng.randrange(20, 90))]

    longs = [arrival(f"long-{i}", 0, prompt(), long_tokens, osl=long_tokens, **sampling) for i in range(num_long)]
    shorts = [
        arrival(f"short-{i}", 12 + 4 * i, prompt(), short_tokens, osl=short_tokens, **sampling)
        for i in range(num_short)
    ]
    return longs + shorts


def conversations(
    seed: int, *, num: int = 3, turns: int = 3, user_tokens: int = 70, answer_tokens: int = 40
) -> list[dict[str, Any]]:
    """Conversations that take turns, so that each has long lost its blocks when its next turn comes."""
    rng = random.Random(seed)
    made = []
    for turn in range(turns):
        for i in range(num):
            said = [rng.randrange(32, 127) for _ in range(user_tokens)]
            made.append(arrival(f"c{i}-t{turn}", 40 * (turn * num + i), said, answer_tokens))
            if turn:
                made[-1]["after"] = f"c{i}-t{turn - 1}"
    return made


def run_engines(
    folder: Path, runs: Sequence[Mapping[str, Any]], *, boot: str = "plain", timeout_s: float = 400
) -> dict[str, Outcome]:
    """Run the runs in one fresh process, one engine after the other; returns their outcomes by name.

    Raises:
        RuntimeError: The process failed or did not end within ``timeout_s``; the message ends with its log.
    """
    job, result, log = folder / "job.json", folder / "result.json", folder / "log.txt"
    job.write_text(json.dumps({"boot": boot, "runs": runs}))
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(job), str(result)],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            end_group(process)
    if code != 0:
        tail = log.read_text(errors="replace")[-6000:]
        raise RuntimeError(f"engines of {[r['name'] for r in runs]} ended with {code}:\n{tail}")
    return {name: Outcome(**raw) for name, raw in json.loads(result.read_text()).items()}


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process started with ``start_new_session`` and all its descendants that stayed in its group."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait(timeout=10)
