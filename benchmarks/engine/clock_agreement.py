"""Does the engine's clock of `vllm-ext compare` say what the wall clock says?

Question: on a small or a shared machine `compare --clock engine` is all that is worth anything. Are its seconds those
of servers?

Method: `vllm-ext compare` by the wall clock, on servers of a model with random weights whose steps take some 50 ms on a
CPU: of shorter ones the API server and the client, on the same two cores, take a part that they would not take of a
GPU's. The servers write what their steps took (`--ext-step-record`). Then the same comparison by the engine's clock,
on which a step takes what that record says: the same requests, rates and flags, twice each. The API server, the client
and the network are in the first only. A ratio is seconds by the engine's clock over those by the wall clock; beside it
stands what the same server, started twice, differs by on the wall. Run it where nobody else computes.

    OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind python benchmarks/engine/clock_agreement.py --quick
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from comparisons import by_server, model_flags

from vllm_ext.cli import compare
from vllm_ext.compare.observed import MEAN, P99
from vllm_ext.compare.shown import Shown
from vllm_ext.report.claim import Claim
from vllm_ext.report.results import Result, argument_parser, command, emit
from vllm_ext.report.table import Table
from vllm_ext.tiny_model import build

SYSTEMS = ("fcfs", "alise")
FLAGS = (
    f"{model_flags(layers=10, kv_heads=8)} --dtype float32 --enforce-eager --block-size 32 --max-model-len 1024 "
    "--max-num-seqs 32 --num-gpu-blocks-override 192 --kv-cache-memory-bytes 1073741824"
)
WORKLOAD = ("--dataset", "sharegpt-like", "--set", "workload.max_tokens=512", "--set", "workload.scale_output=0.5")
LOADS, QUICK_LOADS = "0.7,0.9", "0.9"
REQUESTS, QUICK_REQUESTS = 60, 20
MEASURES = {MEAN: 0.1, P99: 0.15, "mean TTFT": None, "mean TPOT": None}
"""Measure -> by how much of the wall clock's seconds the other may be off; None: told only."""


def compared(flags: Sequence[str], passed: Sequence[str]) -> tuple[Shown, Result]:
    """Run `vllm-ext compare`, and return what it found.

    Raises:
        SystemExit: it found nothing, with its exit status.
    """
    found: list[tuple[Shown, Result]] = []
    status = compare.run([*flags, "--", *passed], lambda shown, made: found.append((shown, made)))
    if not found:
        raise SystemExit(status)
    return found[0]


def main(argv: Sequence[str]) -> None:
    """Compare by both clocks, print, write."""
    parser = argument_parser(__doc__)
    args = parser.parse_args(argv)
    loads, count = (QUICK_LOADS, QUICK_REQUESTS) if args.quick else (LOADS, REQUESTS)
    with tempfile.TemporaryDirectory() as folder:
        steps, passed = Path(folder, "steps.jsonl"), shlex.split(FLAGS)
        flags = [
            str(build()), "--systems", ",".join(SYSTEMS), *WORKLOAD, "--loads", loads, "--requests", str(count),
            "--seed", str(args.seed), "--cells", folder, "--precision", "9", "--budget-minutes", "60",
        ]  # fmt: skip
        wall, made = compared(flags, [*passed, "--ext-step-record", str(steps)])
        rate = ["--rate-at-1", repr(wall.found.rate_per_s)]
        engine, by_clock = compared([*flags, *rate, "--clock", "engine", "--profile", str(steps)], passed)
    result = judged(wall, made, engine, by_clock, command(argv, __file__))
    emit(result, [Table(result.config["columns"], result.config["rows"])], args.out)


def judged(wall: Shown, made: Result, engine: Shown, by_clock: Result, said: str) -> Result:
    """Return both, the ratios and whether they are small enough."""
    by_wall, by_engine = by_server(wall, made), by_server(engine, by_clock)
    rows, claims, metrics, baseline = [], [], {}, {}
    for load in wall.asked.loads:
        for row in wall.asked.rows:
            for measure, allowed in MEASURES.items():
                key = f"load_{load:g}.{measure}"
                real, clocked = by_wall[row.name][key], by_engine[row.name][key]
                twin = by_wall[wall.asked.twin.name][key] / by_wall[wall.asked.baseline.name][key]
                rows.append([f"{load:g}", row.name, measure, f"{real:.3g}", f"{clocked:.3g}", f"{clocked / real:.2f}",
                             f"{twin:.2f}"])  # fmt: skip
                metrics[f"{row.name}.{key}_s"], baseline[f"{row.name}.{key}_s"] = clocked, real
                if allowed is not None and row != wall.asked.twin:
                    claims.append(Claim(
                        name=f"{row.name} at {load:g}: {measure}, by which the engine's clock is off",
                        value=round(abs(clocked / real - 1), 4), op="<=", goal=allowed,
                        why="the API server and the client take time that no step has",
                        facts=f"{clocked:.3g} and {real:.3g} s; the same server twice {twin:.2f}",
                    ))  # fmt: skip
    columns = ["load", "server", "measure", "wall clock, s", "engine's clock, s", "ratio", "the same twice"]
    return replace(
        made, name="clock_agreement", command=said, metrics=metrics, baselines={"wall clock": baseline}, claims=claims,
        config={**made.config, "columns": columns, "rows": rows, "stopped_by_the_clock": engine.found.stopped},
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
