"""What does the attention backend for 8-bit records cost a step that reads none?

Question: with `kv_tier.device_int8_share` vLLM's attention backend is wrapped, and our scheduler minds records. How
much longer does a decode step take than the same scheduler's over vLLM's own backend, while nothing is in 8 bits?

Method: real engines, each in a process of its own, one thread, take turns of some steps with the same requests; an A/A
pair is among them. Memory is ample, so that nothing is evicted and no record made. Compared is the CPU time of whole
steps, scheduler and model included, of a Llama with random weights; reported is the median ratio of neighbouring turns
with its quartiles, and the difference in microseconds, which does not depend on the model's size.

    python benchmarks/attention/attention_passing.py --quick
    python benchmarks/attention/attention_passing.py --out benchmarks/results/attention_passing.json
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing as mp
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from vllm_ext.report.claim import Claim
from vllm_ext.report.results import Result, Workload, argument_parser, command, emit
from vllm_ext.report.table import Table
from vllm_ext.report.timing import Seconds, ratio
from vllm_ext.tiny_model import Style, build

STOCK, AGAIN, PASSING, OWN = "vLLM's backend", "vLLM's backend, again", "passing through", "own kernel"
SHARE = 0.3
"""Of the device's KV memory that is set aside for records."""
GOAL = 1.01
PROMPT, OUTPUT, MARGIN = 128, 1024, 8
"""Tokens of a request, and steps that are left over before it ends."""
SIZES: Mapping[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
STARTED_S = 300.0


def options(row: str) -> dict[str, Any]:
    """Return what ``additional_config`` says of a row."""
    if row in (STOCK, AGAIN):
        return {}
    return {"kv_tier": {"device_int8_share": SHARE}, "attention": {"kernel": "own" if row == OWN else "stock"}}


def serve(row: str, requests: int, seed: int, pipe: Connection) -> None:
    """Answer each number of steps with the CPU seconds that they took; start requests anew before they end."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(build(Style.LLAMA)),
        load_format="dummy",
        hf_overrides=dict(SIZES),
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=requests,
        block_size=32,
        kv_cache_memory_bytes=2**30,
        enable_prefix_caching=True,
        disable_log_stats=True,
        scheduler_cls="fcfs",
        additional_config={"vllm_ext": {"prediction": {"sources": ["hint", "history"]}, **options(row)}},
    )
    torch.set_num_threads(1)
    engine, numbers, left, started = llm.llm_engine, np.random.default_rng(seed), 0, 0
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    filling = requests * PROMPT // 2048 + MARGIN
    pipe.send("ready")
    while steps := pipe.recv():
        if left < steps + MARGIN:
            engine.abort_request([f"{started - i - 1}" for i in range(min(requests, started))])
            for _ in range(requests):
                prompt = {"prompt_token_ids": numbers.integers(10, 250, PROMPT).tolist()}
                engine.add_request(str(started), prompt, sampling)
                started += 1
            for _ in range(filling):
                engine.step()
            left = OUTPUT - filling
        before = time.process_time()
        for _ in range(steps):
            engine.step()
        pipe.send(time.process_time() - before)
        left -= steps


@contextmanager
def engine(row: str, requests: int, seed: int) -> Iterator[Connection]:
    """Start an engine in a process of its own, which sends a word when it is ready and ends with the block."""
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=serve, args=(row, requests, seed, there))
    child.start()
    there.close()
    try:
        yield here
    finally:
        child.terminate()
        child.join()


def measure(rows: Sequence[str], args: argparse.Namespace) -> dict[str, Seconds]:
    """Return the CPU seconds of a step by turn, of each row.

    Raises:
        RuntimeError: an engine did not start.
        EOFError: an engine ended.
    """
    found: dict[str, list[float]] = {row: [] for row in rows}
    with ExitStack() as stack:
        pipes = {row: stack.enter_context(engine(row, args.requests, args.seed)) for row in rows}
        for row, pipe in pipes.items():
            if not pipe.poll(STARTED_S) or pipe.recv() != "ready":
                raise RuntimeError(f"{row}: the engine did not start within {STARTED_S:g} s")
        for turn in range(args.turns + 1):
            for row in rows if turn % 2 else reversed(rows):
                pipes[row].send(args.steps)
                took = pipes[row].recv() / args.steps
                if turn:  # the first warms up
                    found[row].append(took)
    return {row: np.array(times) for row, times in found.items()}


def main(argv: Sequence[str]) -> None:
    """Measure, print, write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--requests", type=int, default=32, help="that decode at a time (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=40, help="of each engine (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="of a turn (default: %(default)s)")
    args = parser.parse_args(argv)
    if min(args.requests, args.turns, args.steps) < 1:
        parser.error("--requests, --turns, --steps: must be at least 1")
    if args.quick:
        args.turns, args.steps = 5, 5
    rows = (STOCK, AGAIN, PASSING, OWN)
    times = measure(rows, args)
    metrics: dict[str, dict[str, float]] = {}
    lines = []
    for row in rows:
        middle, low, high = ratio(times, row, STOCK)
        more_us = float(np.median(times[row] - times[STOCK])) * 1e6
        step_ms = float(np.median(times[row])) * 1e3
        metrics[row] = {"step_ms": round(step_ms, 3)}
        if row != STOCK:
            metrics[row] |= {
                "ratio": round(middle, 4),
                "q1": round(low, 4),
                "q3": round(high, 4),
                "more_us": round(more_us),
            }
        lines.append([row, step_ms, middle, low, high, more_us])
    passing = metrics.pop(PASSING)
    note = f"quartiles {passing['q1']} to {passing['q3']}; an A/A pair: {metrics[AGAIN]['ratio']}"
    config = {"requests": args.requests, "turns": args.turns, "steps": args.steps, "share": SHARE, "model": dict(SIZES)}
    result = Result(
        name="attention_passing",
        command=command(argv, __file__),
        config=config,
        seed=args.seed,
        workload=Workload(
            name="random tokens", rows=args.requests, sha256=hashlib.sha256(repr(config).encode()).hexdigest()
        ),
        metrics=passing,
        baselines=metrics,
        claims=[Claim(name="passing through, x vLLM's step", value=passing["ratio"], op="<=", goal=GOAL, facts=note)],
    )
    header = ["backend", "ms a step", "over vLLM's", "q1", "q3", "us more"]
    emit(result, [Table(header, lines)], args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
