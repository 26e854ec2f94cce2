"""Offline engines for the end-to-end tests: request scripts, and what each engine made of its own."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import forks
from forks import ENVIRONMENT, ForkServer

SCRIPT = Path(__file__).with_name("engine_script.py")
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

EAGER: Mapping[str, Any] = {"vllm_ext": {"prediction": {"sources": ["hint", "history"]}}}
"""Options of alise-published, which preempts for anything that ranks better; without the predictor's process, which
would be one more of them for every engine (`test_e2e_prediction` has it). These tests are of what a preemption does to
the output.
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
    kv_device: dict[str, Any]
    """What became of KV in 8 bits on the device; empty where none is kept so."""
    kv_tier: dict[str, Any]
    """What became of KV in host memory; empty without it."""
    attention: dict[str, Any]
    """Steps and tokens by kernel; empty where vLLM's own backend serves."""
    left: dict[str, str]
    """Requests that their clients aborted, and what they did then; see `odd_aborts`."""
    fullest: float
    """Largest share of the device's KV blocks in use, seen by the same."""
    plans: dict[str, int]
    """How far vLLM followed them; see `plan_counts`."""
    drafts: float
    accepted_tokens: float
    """Of drafts."""
    host_hit_tokens: float
    """Prompt tokens whose KV came from host memory; vLLM does not count those of preempted requests."""
    host_bytes_stored: float
    host_bytes_loaded: float
    disk: dict[str, float]
    """What lay there at most, and what vLLM's metrics say of it; empty unless the run asked for it."""
    scheduler: str
    batch_queue: int
    runner: str
    blocks_missing: int
    left_running: int
    left_waiting: int
    record: dict[str, Any]
    """Settings and lines of a recording (`simulation.recorded.recorder`); empty unless the run asked for it."""
    log: str
    """File with what the engine printed."""


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
    seed: int, *, num: int = 3, turns: int = 3, user_tokens: int = 70, answer_tokens: int = 40, drops: int = 0
) -> list[dict[str, Any]]:
    """Conversations that take turns, so that each has long lost its blocks when its next turn comes.

    Where next turns leave out what answers begin with, conversations have names: else nobody knows them again.
    """
    rng = random.Random(seed)
    made = []
    for turn in range(turns):
        for i in range(num):
            said = [rng.randrange(32, 127) for _ in range(user_tokens)]
            named = {"extra_args": {"conversation_id": f"c{i}"}} if drops else {}
            made.append(arrival(f"c{i}-t{turn}", 40 * (turn * num + i), said, answer_tokens, **named))
            if turn:
                made[-1] |= {"after": f"c{i}-t{turn - 1}", "drops": drops}
    return made


class Engines:
    """Runs offline engines, each in a fork of a process that has imported vLLM: the import costs more than most runs.

    Runs of vLLM's own scheduler are references, which several modules compare with: each is computed once.
    """

    def __init__(self, folder: Path, shared: Path, server: ForkServer | None) -> None:
        """Prepare.

        Args:
            folder: Of this process, for logs and results.
            shared: With other processes that run the same tests, for references.
            server: What to fork from; nothing to start a process of its own for it.
        """
        self._folder, self._shared, self._server = folder, shared, server
        self._own: ForkServer | None = None
        self._jobs = 0

    def __call__(self, runs: Sequence[Mapping[str, Any]], *, boot: str = "plain") -> dict[str, Outcome]:
        """Run the runs, one engine after the other; returns their outcomes by name.

        Args:
            runs: See `engine_script`.
            boot: ``plain``, ``async``, ``v2`` or ``cuda``.

        Raises:
            RuntimeError: An engine failed; the message ends with its log.
        """
        return {run["name"]: self._known(run, boot) if _is_reference(run) else self._run(run, boot) for run in runs}

    def close(self) -> None:
        """End the process that was started to be forked from."""
        if self._own is not None:
            self._own.close()

    def _known(self, run: Mapping[str, Any], boot: str) -> Outcome:
        key = hashlib.sha256(json.dumps([boot, run["engine"], run["arrivals"]], sort_keys=True).encode()).hexdigest()
        kept = self._shared / f"{key[:24]}.json"
        with kept.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                kept.write_text(json.dumps(asdict(self._run(run, boot))))
        return Outcome(**json.loads(kept.read_text()))

    def _run(self, run: Mapping[str, Any], boot: str) -> Outcome:
        self._jobs += 1
        job, result, log = (self._folder / f"{self._jobs}-{run['name']}.{kind}" for kind in ("job", "result", "log"))
        job.write_text(json.dumps({"boot": boot, "run": run}))
        command = [sys.executable, str(SCRIPT), str(job), str(result)]
        environment = {**os.environ, **ENVIRONMENT}
        ended = forks.run(self._forks(boot), "engine_script:main", command, environment=environment, log=log)
        if ended.code != 0:
            raise RuntimeError(f"engine {run['name']} ended with {ended.code}:\n{ended.output[-6000:]}")
        return Outcome(**json.loads(result.read_text()), log=str(log))

    def _forks(self, boot: str) -> ForkServer | None:
        """What to fork from: nothing where Triton must be changed before vLLM is imported."""
        if boot in ("v2", "cuda"):
            return None
        if self._server is None:
            self._server = self._own = ForkServer(self._folder / "forks.log")
        return self._server


def _is_reference(run: Mapping[str, Any]) -> bool:
    """Whether a run is of vLLM alone, by what vLLM is told."""
    return "scheduler_cls" not in run["engine"] and not set(run) - {"name", "engine", "arrivals"}
