"""Does batching at every step serve more, sooner, than batching whole requests, and what does it cost?

Method: `vllm-ext cellular`'s engine and the same engine with padded batching, graph merging and one request at a time,
on this CPU with one thread: LSTMs of hidden size 256 and 1024 over made-up sentences that all arrive at once, repeats
in turns, judged by CPU time of the worker (`cellular_real.py`); the ideal is a batch of equal lengths in a plain loop.
Every manner must give the same answers, or the benchmark fails. Latencies at half of the padded engine's peak are wall
time. Then 32 streams of audio at the speed of speech through an RNN-T; the scheduler's cost by what is queued;
objectives met at 1.2 times capacity, by arrival and by slack, in virtual time (`cellular_virtual.py`); what merging
costs; and with ``--data``, the headlines on lengths of WMT and trees of SST.

Output: a table; one JSON object.

    OMP_NUM_THREADS=1 python benchmarks/cellular/cellular.py --quick
    OMP_NUM_THREADS=1 python benchmarks/cellular/cellular.py --data DIR --out benchmarks/results/cellular.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cellular_real as real
import cellular_virtual as virtual
import torch

from vllm_ext.cellular.train import trained
from vllm_ext.experiments.batching import workloads
from vllm_ext.report.claim import Claim
from vllm_ext.report.common_flags import at_least
from vllm_ext.report.results import Result, argument_parser, command, emit
from vllm_ext.report.table import Table

FIXED = 24
OURS, PADDED, MERGED, ALONE = "cellular", "padded", "merged", "one by one"
QUEUES = (600, 2_000, 10_000)


def ideal(hidden: int, batch: int, repeats: int) -> float:
    """Requests per CPU second of a plain loop over a batch of equal lengths."""
    step = real.lstm(hidden).modules["step"]
    tokens = torch.randint(real.VOCABULARY, (FIXED, batch))
    rates = []
    with torch.inference_mode():
        for _ in range(repeats + 1):
            h = c = torch.zeros(batch, hidden)
            begin = time.thread_time()
            for token in tokens:
                h, c = step(token, h, c)
            rates.append(batch / (time.thread_time() - begin))
    return statistics.median(rates[1:])


def measure_lstm(args: argparse.Namespace, hidden: int) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Made-up sentences and equal lengths, all at once; latencies at half of the padded engine's peak."""
    model, batch = real.lstm(hidden), args.batch
    count = args.requests[hidden]
    lengths = [source for source, _ in workloads.pairs(count, args.seed).rows]
    requests = real.sentences(lengths, args.seed)
    manners = {OURS: None, PADDED: real.padded(batch)}
    found = real.saturated(model, requests, manners, batch, args.repeats)
    few = real.sentences(lengths[: max(count // 16, 8)], args.seed)
    slow = {MERGED: real.merged, ALONE: real.padded(1)} if hidden == 256 else {ALONE: real.padded(1)}
    found |= real.saturated(model, few, slow, batch, 1)
    equal = real.sentences([FIXED] * count, args.seed)
    fixed, best, shares = {}, 0.0, []
    for _ in range(args.repeats):  # in turns, as the core's clock changes
        fixed = real.saturated(model, equal, {OURS: None}, batch, 1)[OURS]
        best = ideal(hidden, batch, 3)
        shares.append(fixed["requests_per_cpu_s"] / best)
    name = f"lstm_{hidden}_"
    metrics = {f"{name}{key}": value for key, value in found[OURS].items()}
    metrics |= {
        f"{name}over_padded": found[OURS]["requests_per_cpu_s"] / found[PADDED]["requests_per_cpu_s"],
        f"{name}fixed_share_of_ideal": statistics.median(shares),
        f"{name}fixed_share_of_ideal_low": min(shares),
        f"{name}fixed_share_of_ideal_high": max(shares),
        f"{name}fixed_scheduling_share": fixed["scheduling_share"],
    }
    beside = {other: {f"{name}{key}": value for key, value in found[other].items()} for other in found if other != OURS}
    beside["ideal"] = {f"{name}requests_per_cpu_s": best}
    if hidden == 256:
        wall = measure_wall(model, requests, batch, args.seed)
        metrics |= {f"{name}half_load_{key}": value for key, value in wall[OURS].items()}
        beside[PADDED] |= {f"{name}half_load_{key}": value for key, value in wall[PADDED].items()}
        metrics[f"{name}half_load_p90_saved"] = 1 - wall[OURS]["p90_ms"] / wall[PADDED]["p90_ms"]
    return metrics, beside


def measure_wall(model: Any, requests: list[dict[str, Any]], batch: int, seed: int) -> dict[str, dict[str, float]]:
    """Latencies at half of the padded engine's peak of this very moment, so that foreign load meets both alike."""
    with real.engine(model, real.padded(batch), batch, len(requests)) as one:
        begin = time.monotonic()
        for handle in [one.submit(request) for request in requests]:
            real.values(handle)
        rate = len(requests) / (time.monotonic() - begin) / 2
    part = requests[: max(len(requests) // 2, 32)]
    return {
        name: real.at_load(model, part, make, batch, rate, seed)
        for name, make in ((OURS, None), (PADDED, real.padded(batch)))
    }


def measure_streams(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """32 streams of audio, in chunks of four frames."""
    model, _ = trained("rnnt", seed=args.seed, steps=60 if args.quick else 300, hidden=128)
    audio = real.speech(model, 32, 12 if args.quick else 50, args.seed)
    manners = {OURS: None, PADDED: real.padded(64, width=1), ALONE: real.padded(1, width=1)}
    return real.streams(model, audio, manners, 1 if args.quick else 3)


def claims_of(metrics: dict[str, float], beside: dict[str, dict[str, float]]) -> list[Claim]:
    """Judge what was measured."""
    queue = [metrics[f"scheduling_us_queued_{queued}"] for queued in QUEUES]
    streams = beside[PADDED]["rnnt_chunk_p99_ms"], beside[ALONE]["rnnt_chunk_p99_ms"]
    notes = {
        "lstm_1024_over_padded": "on a CPU large batches gain little, so that padding costs its rows and no more",
        "lstm_256_over_padded": "as at 1024, and a task is short beside the engine's own work per request",
        "lstm_256_fixed_share_of_ideal": "a task is short beside gathering and the engine's own work per request",
        "lstm_1024_fixed_share_of_ideal": "gathering and the engine's work per request",
    }
    claims = [
        Claim(name=f"lstm_{hidden}_{what}", value=metrics[f"lstm_{hidden}_{what}"], op=">=", goal=goal,
             facts=notes[f"lstm_{hidden}_{what}"])
        for hidden in (256, 1024) for what, goal in (("over_padded", 1.25), ("fixed_share_of_ideal", 0.87))
    ]  # fmt: skip
    claims += [
        Claim(name="lstm_256_half_load_p90_saved", value=metrics["lstm_256_half_load_p90_saved"], op=">=", goal=0.375,
             facts="wall time on a machine with other load"),
        Claim(name="lstm_1024_fixed_scheduling_share", value=metrics["lstm_1024_fixed_scheduling_share"], op="<=",
             goal=0.05, facts="CPU time of scheduling and handing out over the worker's"),
        Claim(name="scheduling_us most queued / fewest", value=queue[-1] / queue[0], op="<=", goal=1.5,
             facts="what lies behind the queue's front should not matter"),
        Claim(name="objectives met, slack - arrival", op=">=", goal=0.2,
             value=metrics["attainment_slack"] - metrics["attainment_arrival"],
             facts="of requests, at 1.2 times capacity"),
        Claim(name="rnnt_chunk_p99_ms / padded", value=metrics["rnnt_chunk_p99_ms"] / streams[0], op="<=", goal=1.0,
             facts="scheduling a task of one or two nodes costs more than with padded batching"),
        Claim(name="rnnt_chunk_p99_ms / one by one", op="<=", goal=1.0,
             value=metrics["rnnt_chunk_p99_ms"] / streams[1],
             facts="alone, each stream's steps wait for those of all others"),
    ]  # fmt: skip
    return claims


def main(argv: Sequence[str]) -> None:
    """Measure, print, write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="with wmt_en_de_10k.tsv.gz and sst_trees_dev.txt.gz")
    parser.add_argument("--repeats", type=at_least(1), default=3, help="turns of the manners (default: %(default)s)")
    args = parser.parse_args(argv)
    args.batch = 64 if args.quick else 256
    args.requests = {256: 200, 1024: 48} if args.quick else {256: 1_500, 1024: 250}
    args.repeats = 1 if args.quick else args.repeats
    torch.set_num_threads(1)
    metrics: dict[str, float] = {}
    beside: dict[str, dict[str, float]] = {}
    for hidden in args.requests:
        print(f"LSTM, hidden size {hidden}", file=sys.stderr, flush=True)
        ours, others = measure_lstm(args, hidden)
        metrics |= ours
        for name, values in others.items():
            beside.setdefault(name, {}).update(values)
    print("streams", file=sys.stderr, flush=True)
    for name, values in measure_streams(args).items():
        into = metrics if name == OURS else beside[name]
        into.update({f"rnnt_{key}": value for key, value in values.items()})
    print("virtual time", file=sys.stderr, flush=True)
    metrics |= {f"scheduling_us_queued_{queued}": virtual.scheduling_us(queued) for queued in QUEUES}
    met = virtual.attainment(args.seed, 4_000 if args.quick else 30_000)
    metrics |= {f"attainment_{name}": share for name, share in met.items()}
    trees = workloads.trees(200, args.seed)
    metrics |= virtual.merging_us(trees.rows, 3 if args.quick else 20)
    if args.data is not None:
        metrics |= virtual.public_lstm(args.data / "wmt_en_de_10k.tsv.gz", 0.2 if args.quick else 1.5, args.seed)
        metrics |= virtual.public_trees(args.data / "sst_trees_dev.txt.gz", 0.1 if args.quick else 0.5, args.seed)
    result = Result(
        name="cellular",
        command=command(argv, __file__),
        config={"batch": args.batch, "requests": {str(h): n for h, n in args.requests.items()}, "repeats": args.repeats,
                "threads": 1, "fixed_length": FIXED, "streams": 32, "chunk_s": real.CHUNK_S,
                "interval": "low and high are the least and the most of the repeats"},
        seed=args.seed,
        workload=workloads.pairs(args.requests[256], args.seed).workload,
        metrics=metrics,
        baselines=beside,
        claims=claims_of(metrics, beside),
    )  # fmt: skip
    names = [OURS, *beside]
    keys = list(dict.fromkeys(key for one in (metrics, *beside.values()) for key in one))
    rows = [[key, *(one.get(key) for one in (metrics, *beside.values()))] for key in keys]
    emit(result, [Table(["", *names], rows)], args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
