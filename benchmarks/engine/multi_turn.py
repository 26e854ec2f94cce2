"""Conversations with think times on the real engine: what is it worth to keep the KV of past turns, and where?

Method: `AsyncLLM` on the CPU serves recorded conversations (public ShareGPT-like files), or made-up ones. Conversations
begin as a Poisson process; each turn's prompt is the whole history, with the tokens that the engine really generated,
and a new message; it comes an exponential think time after the last answer has ended. An answer ends at the length of
the recorded one, which no policy can see (`forced_length`). Recorded lengths are estimated
from the texts, times ``--length-scale``; the tokens are made up. A conversation ends where it no longer fits into the
context, or after ``--max-turns``.

Every row (see multi_turn_rows.py) gets a fresh engine in a fresh process, the same conversations, and as many blocks on
the device; all host tiers get the same number of bytes. ``stateless`` computes every history again, ``prefix-cache`` is
upstream with what the device still holds, ``tier-lru`` and ``tier-arc`` are vLLM's offloading policies over our copies
(its own refuse the CPU), the others are ours. Rows take turns, so that the machine's drift falls on all of them: each
is measured at the middle one of the rates, and then at higher ones until it is beyond the target, or else at lower ones
until it is not.

The result is the rate of conversations that a row sustains at a P90 normalised latency (a turn's time from its arrival
to its last token, per token of its answer) of ``--target-ms``, interpolated between the rates measured; beside it,
where the tokens of the histories came from, and TTFT of first and later turns. Rates are compared within a repeat.

    python benchmarks/engine/multi_turn.py --quick
    OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind python benchmarks/engine/multi_turn.py --repeats 2 \\
        --keep /tmp/cells --out benchmarks/results/multi_turn.json
    python benchmarks/engine/multi_turn.py --conversations chats.jsonl.gz --rates 0.5,1,2 --think-s 10

Output: tables on stderr; the last line on stdout is the result as JSON (see benchmarks/README.md).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import engine_process
import multi_turn_options
import multi_turn_report as report
import multi_turn_rows as rows
import multi_turn_workload as workload
from engine_process import progress
from engine_report import Cell, WrongOutput, flatten, reduce, timelines

from vllm_ext import tiny_model
from vllm_ext.files import replaced, set_aside
from vllm_ext.report import results
from vllm_ext.simulation.measure import latency
from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.spec import WorkloadSpec

TARGET_OVER_UNLOADED = 2.0
"""The latency at which rates are compared, over that of an idle stateless server."""
_MEASURED = "measured"
_ANY_RATE = 1.0
_logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> None:
    """Measure and report; exits with an error when a row serves wrong outputs."""
    args = multi_turn_options.parse(__doc__ or "", argv)
    try:
        run = _Run(args)
        result = run.measure(argv)
    except (WrongOutput, engine_process.CellFailed, ValueError) as error:
        raise SystemExit(f"multi_turn: {error}") from error
    results.emit(result, run.tables, args.out)


class _Run:
    """One invocation: its conversations, what was measured before them, and the cells so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._model = Path(args.model) if args.model else tiny_model.build()
        self._first = build(workload.spec(args, 0, _ANY_RATE))
        self._extents = [self._extent(repeat) for repeat in range(args.repeats)]
        self._kv = workload.kv_of(self._model, args.hf_overrides, workload.DTYPE_BYTES[args.dtype])
        workload.set_sizes(args, self._extents[0], self._kv.bytes_per_token)
        held = {row: rows.tier_tokens(row, args, self._kv) for row in args.rows}
        self._tier_tokens = {row: tokens for row, tokens in held.items() if tokens is not None}
        self._kept = Kept(args.keep)
        self._settings: dict[str, Any] = {}
        self.tables: list[str] = []

    def measure(self, argv: Sequence[str]) -> results.Result:
        """Measure what stateless serving carries, unless told; then every cell; and assemble the result."""
        args = self._args
        calibration = {} if args.rates is not None and args.target_ms is not None else self._calibrate()
        rates = args.rates or [load * calibration["stateless_conversations_per_s"] for load in args.loads]
        target_ms = args.target_ms or TARGET_OVER_UNLOADED * calibration["unloaded_p90_ms_per_token"]
        cells = [cell for repeat in range(args.repeats) for cell in self._repeat(sorted(rates), target_ms, repeat)]
        found = reduce(cells)
        reduced = {(row, rate): found[row, rate] for rate in rates for row in args.rows if (row, rate) in found}
        report.add_spread(cells, reduced)
        sustained = report.sustained(cells, target_ms)
        sustained = {row: sustained[row] for row in args.rows}
        baseline_rows = [row for row in args.rows if rows.ROWS[row].baseline]
        metrics, baselines = flatten(reduced, baseline_rows, "rate_{:.3g}")
        for row, summed in report.summary(sustained).items():
            if row in baseline_rows:
                baselines[row] |= summed
            else:
                metrics |= {f"{row}.{name}": value for name, value in summed.items()}
        self.tables = report.tables(reduced, sustained, target_ms)
        return results.Result(
            name="multi_turn",
            command=results.command(argv, __file__),
            config=self._config(rates),
            details={"engine": self._settings},
            seed=args.seed,
            workload=results.Workload(name=self._first.name, rows=self._first.rows, sha256=self._first.sha256),
            metrics={**calibration, "target_p90_ms_per_token": target_ms, **metrics},
            baselines=baselines,
            claims=report.claims(reduced, sustained, self._tier_tokens, args.note),
        )

    def _repeat(self, rates: Sequence[float], target_ms: float, repeat: int) -> Iterator[Cell]:
        """Measure every row at the middle rate, and then in rounds at the next that says where it crosses the target.

        Another row is first each time.
        """
        climbs = {row: report.climb(rates, target_ms) for row in self._args.rows}
        asked = {row: next(climb) for row, climb in climbs.items()}
        order = list(climbs)
        while asked:
            order = order[1:] + order[:1]
            for row in [row for row in order if row in asked]:
                cell = self._cell(row, asked.pop(row), repeat)
                yield cell
                with contextlib.suppress(StopIteration):
                    asked[row] = climbs[row].send(cell.metrics[report.P90])

    def _extent(self, repeat: int) -> workload.Extent:
        return workload.extent(build(workload.spec(self._args, repeat, _ANY_RATE)))

    def _calibrate(self) -> dict[str, float]:
        """Measure stateless serving of one client at a time, and of as many as there are seats; nobody thinks."""
        label = "stateless, idle and saturated"
        phases = workload.calibration(self._args)
        served = engine_process.serve(label, self._spec(rows.STATELESS, phases))["phases"]
        lines = {name: timelines(label, served[name]["requests"]) for name in phases}
        saturated = lines[workload.SATURATED]
        tokens = sum(len(line.token_times_s) for line in saturated)
        per_s = latency.saturated_tokens_per_s(saturated) * self._args.num_conversations / tokens
        idle = latency.summarise(lines[workload.UNLOADED])[report.P90]
        progress(f"stateless: idle {idle:.3g} ms/token at P90; carries {per_s:.3g} conversations/s")
        return {"unloaded_p90_ms_per_token": idle, "stateless_conversations_per_s": per_s}

    def _cell(self, row: str, rate: float, repeat: int) -> Cell:
        label = f"{row} at {rate:.3g} conversations/s, repeat {repeat}"
        spec = self._spec(row, {_MEASURED: workload.spec(self._args, repeat, rate)})
        cell = self._kept.find(spec)
        if cell is None:
            observed = engine_process.serve(label, spec)
            metrics = report.cell_metrics(label, observed["phases"][_MEASURED], self._extents[repeat].turns)
            metrics["engine_start_s"] = observed["engine_start_s"]
            cell = {"metrics": metrics, "settings": observed["settings"]}
            self._kept.keep(spec, cell)
        metrics, self._settings[row] = cell["metrics"], cell["settings"]
        shares = "device_hit_share", "host_hit_share", "recomputed_share"
        where = ", ".join(f"{name.removesuffix('_share')} {metrics[name]:.0%}" for name in shares if name in metrics)
        progress(f"{label}: P90 {metrics[report.P90]:.3g} ms/token, {where}")
        return Cell(system=row, at=rate, repeat=repeat, metrics=metrics)

    def _spec(self, row: str, phases: Mapping[str, WorkloadSpec]) -> dict[str, Any]:
        """Return a cell; the warm-up comes twice, so that copies in both directions have been made once."""
        warmup = {"name": "warmup", "workload": workload.WARMUP.model_dump(mode="json")}
        return {
            "engine_args": {"model": str(self._model), **rows.engine_args(row, self._args)},
            "phases": [
                warmup,
                {**warmup, "forget": "device"},
                *(
                    {"name": name, "workload": phase.model_dump(mode="json"), "forget": "all"}
                    for name, phase in phases.items()
                ),
            ],
        }

    def _config(self, rates: Sequence[float]) -> dict[str, Any]:
        args = self._args
        return {
            "rows": {row: asdict(rows.ROWS[row]) for row in args.rows},
            "rates_conversations_per_s": rates,
            "rates_from": "given" if args.rates is not None else f"{args.loads} times what stateless carries",
            "target_from": "given" if args.target_ms is not None else f"{TARGET_OVER_UNLOADED:g} times stateless, idle",
            "repeats": args.repeats,
            "conversations": [asdict(extent) for extent in self._extents],
            "min_turns": args.min_turns,
            "max_turns": args.max_turns,
            "length_scale": args.length_scale,
            "think_s": args.think_s,
            "tier_gib": args.tier_gib,
            "int8_share": args.int8_share,
            "tier_tokens": self._tier_tokens,
            "kv_bytes_per_token": self._kv.bytes_per_token,
            "model": self._model.name,
            "quick": args.quick,
            "cells_of_an_interrupted_run": self._kept.taken,
        }


class Kept:
    """A folder with one JSON file per cell, named by a digest of what was served, by what, and on which machine.

    A cell of another commit, another vLLM or another processor is not found; a damaged file is reported, set aside and
    measured again.

    Args:
        folder: Made when something is written; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._who = {"versions": results.versions(), "machine": results.machine()}
        self.taken = 0
        """Cells found, and so not measured by this run."""

    def find(self, spec: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what `keep` was given for this specification; None if there is nothing."""
        if self._folder is None:
            return None
        path = self._path(self._folder, spec)
        try:
            found = json.loads(path.read_bytes())
            if not isinstance(found, dict) or not found.keys() >= {"metrics", "settings"}:
                raise ValueError("neither metrics nor settings")
        except FileNotFoundError:
            return None
        except ValueError as damage:
            set_aside(path, damage, what="a measured cell", instead="it is measured again", logger=_logger)
            return None
        self.taken += 1
        return found

    def keep(self, spec: Mapping[str, Any], cell: Mapping[str, Any]) -> None:
        """Write a cell, whole or not at all."""
        if self._folder is None:
            return
        with replaced(self._path(self._folder, spec)) as file:
            file.write(json.dumps(cell).encode())

    def _path(self, folder: Path, spec: Mapping[str, Any]) -> Path:
        decisive = json.dumps({**self._who, "spec": spec}, sort_keys=True)
        return folder / f"{hashlib.sha256(decisive.encode()).hexdigest()[:40]}.json"


if __name__ == "__main__":
    main(sys.argv[1:])
