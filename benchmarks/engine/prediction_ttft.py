"""Does predicting a prompt's output length delay its first token, when the server has nothing else to do?

Method: one engine (`AsyncLLM`, system alise, the embedded tiny model or ``--model``), with its predictor beside it,
serves requests one at a time with pauses between them. Before each, a coin decides whether the predictor is asked. So
both kinds meet the same engine in the same minute, and what the machine does otherwise falls on both alike: two engines
one after the other differ by several percent on a shared machine, which is more than what is looked for. The bootstrap
interval says what this run can tell.

Output: median and P90 of TTFT with and without the question, their ratio with its 95 % interval; goal: the median rises
by no more than 2 %.

    python benchmarks/engine/prediction_ttft.py --quick
    python benchmarks/engine/prediction_ttft.py --out benchmarks/results/prediction_ttft.json
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ext import tiny_model
from vllm_ext.report.claim import Claim
from vllm_ext.report.results import Result, Workload, argument_parser, command, emit
from vllm_ext.report.table import Table
from vllm_ext.simulation.workloads import synthetic

REQUESTS, QUICK_REQUESTS = 600, 120
WARMUP = 10
OUTPUT_TOKENS = 24
PAUSE_S = 0.05
PREDICTOR_START_S = 180.0
GOAL = 1.02
DRAWS = 2000


def main(argv: Sequence[str]) -> None:
    """Measure, print, write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", help="model directory or name (default: the embedded tiny model)")
    parser.add_argument("--requests", type=int, help=f"measured (default: {REQUESTS})")
    args = parser.parse_args(argv)
    count = args.requests or (QUICK_REQUESTS if args.quick else REQUESTS)
    model = args.model or str(tiny_model.build())
    data = synthetic.generate("alpaca-like", rows=count + WARMUP, seed=args.seed)
    prompts = [row.prompt or f"question {number}" for number, row in enumerate(data.rows)]
    with tempfile.TemporaryDirectory(prefix="prediction_ttft-", ignore_cleanup_errors=True) as folder:
        asked, times = asyncio.run(_serve(model, prompts, folder, args.seed))
    metrics, baseline, interval = _summary(asked, times, args.seed)
    goal = Claim(
        name="ttft_p50_ratio",
        value=metrics["ttft_p50_ratio"],
        op="<=",
        goal=GOAL,
        facts=f"95 % interval {interval[0]:.3f} to {interval[1]:.3f}, {asked.sum()} of {len(asked)} requests asked",
    )
    result = Result(
        name="prediction_ttft",
        command=command(argv, __file__),
        config={"model": Path(model).name, "requests": count, "output_tokens": OUTPUT_TOKENS, "pause_s": PAUSE_S},
        seed=args.seed,
        workload=Workload(name=data.name, rows=len(data.rows), sha256=data.sha256),
        metrics=metrics,
        baselines={"not-asked": baseline},
        claims=[goal],
    )
    rows = [["asked", metrics["ttft_p50_ms"], metrics["ttft_p90_ms"]], ["not asked", *baseline.values()]]
    emit(result, [Table(["predictor", "ttft p50 ms", "p90 ms"], rows)], args.out)


async def _serve(model: str, prompts: Sequence[str], folder: str, seed: int) -> tuple[Any, Any]:
    """Return for each measured request whether its length was asked for, [n], and its TTFT in seconds, [n]."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    options = {"predictor": {"folder": folder}, "prediction": {"sources": ["hint", "retrieval", "history"]}}
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model, dtype="float32", enforce_eager=True, max_model_len=512, block_size=32, seed=0,
            num_gpu_blocks_override=64, max_num_seqs=8, gpu_memory_utilization=0.3, scheduler_cls="alise",
            additional_config={"vllm_ext": options},
        )
    )  # fmt: skip
    sampling = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )

    async def first_token_s(number: int) -> float:
        started, first = time.perf_counter(), None
        async for _ in engine.generate(prompts[number], sampling, f"r{number}"):
            first = first if first is not None else time.perf_counter() - started
        assert first is not None
        return first

    try:
        await first_token_s(0)
        predictor = await _ready_predictor(engine)
        ask, coin = predictor.asked, random.Random(seed)
        chosen, times = [], []
        for number in range(1, len(prompts)):
            chosen.append(coin.random() < 0.5)
            predictor.asked = ask if chosen[-1] else lambda *_: None
            times.append(await first_token_s(number))
            await asyncio.sleep(PAUSE_S)
        return np.array(chosen[WARMUP - 1 :]), np.array(times[WARMUP - 1 :])
    finally:
        engine.shutdown()


async def _ready_predictor(engine: Any) -> Any:
    """Return the predictor beside an engine when it has loaded its model, which the first request started.

    Raises:
        RuntimeError: there is none, or it takes too long.
    """
    from vllm_ext.predictor.attach import attached

    found = attached(engine.output_processor)
    if found is None:
        raise RuntimeError("no length predictor is attached to the engine")
    deadline = time.monotonic() + PREDICTOR_START_S
    while not found.service.ready:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the length predictor was not ready after {PREDICTOR_START_S:g} s")
        await asyncio.sleep(0.1)
    return found


def _summary(asked: Any, times: Any, seed: int) -> tuple[dict[str, float], dict[str, float], tuple[float, float]]:
    rng = np.random.default_rng(seed)
    with_it, without = times[asked], times[~asked]

    def drawn(values: Any) -> Any:
        return np.median(rng.choice(values, (DRAWS, len(values))), axis=1)

    low, high = np.quantile(drawn(with_it) / drawn(without), (0.025, 0.975))
    found = [
        {f"ttft_p{q}_ms": round(float(np.percentile(values, q)) * 1e3, 3) for q in (50, 90)}
        for values in (with_it, without)
    ]
    ratio = float(np.median(with_it) / np.median(without))
    metrics = {
        **found[0],
        "ttft_p50_ratio": round(ratio, 4),
        "ttft_p50_ratio_low": round(float(low), 4),
        "ttft_p50_ratio_high": round(float(high), 4),
    }
    return metrics, found[1], (float(low), float(high))


if __name__ == "__main__":
    main(sys.argv[1:])
