"""Schedulers side by side on the real engine: how much latency does an order of service save when a queue forms?

Method: `AsyncLLM` on the CPU (or whatever vLLM runs on here) serves the embedded tiny model, or ``--model``. Every
system gets a fresh engine in a fresh process, the same prompts in the same order at the same Poisson arrival times,
and one constant ``max_tokens``; each request ends at the length of its recorded answer, which no policy can see
(`vllm_ext.simulation.recorded.forced_length`). Loads are fractions of the capacity measured first: upstream, first come
first served, all requests at once, output tokens per second while every seat is taken. Repeats draw new requests and
arrivals and go round the systems, so that machine noise falls on all of them; metrics are medians over repeats,
ratios medians of the ratios within a repeat. A request that does not end at exactly its length fails the run.

With ``--workload mixed-slo`` and ``memory-bound``, requests have latency objectives, in proportion to what an idle
server of this machine does, which is measured first (see engine_slo.py); all of our systems but ``fcfs`` start from a
profile of step times that `vllm-ext profile` measures once with the same settings, as an operator would.

A system's name alone predicts lengths from the history of finished requests. ``NAME@cold`` adds the predictor of
prompts, with an empty memory (it learns while it serves), ``NAME@warm`` one that learned from rows of the same dataset
that are not measured, as `vllm-ext predictor train` does it. Both wait until the predictor is ready before the clock
starts.

With ``--workload swapping``, more answers want to grow than KV memory has room for, of a model large enough that
computing KV again costs something; rows differ in what becomes of a preempted request's KV (ALISE, figure 8). With
``--workload unused-tier`` nothing is preempted and no prompt shared: what does a host tier cost that nobody needs?

    python benchmarks/engine/engine_compare.py --quick
    python benchmarks/engine/engine_compare.py --dataset alpaca.jsonl.gz --dataset-where src=random9k,subset5k \\
        --max-foreign-cores 0.1 --out benchmarks/results/engine_compare.json
    python benchmarks/engine/engine_compare.py --workload mixed-slo --repeats 2 --max-foreign-cores 0.1
    python benchmarks/engine/engine_compare.py --workload memory-bound --repeats 2 --max-foreign-cores 0.1
    OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind python benchmarks/engine/engine_compare.py --workload swapping
    OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind python benchmarks/engine/engine_compare.py --workload unused-tier

Output: a table on stderr; the last line on stdout is the result as JSON (see benchmarks/README.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import engine_claims
import engine_process
import engine_report as report
import engine_requests
import engine_rows as rows
import engine_slo as slo
from engine_options import parser, set_defaults
from engine_process import progress
from engine_requests import MEASURED

from vllm_ext import systems, tiny_model
from vllm_ext.report import results
from vllm_ext.report.table import Table
from vllm_ext.simulation.measure import latency
from vllm_ext.simulation.recorded import recording
from vllm_ext.simulation.recorded.recording import ClientRequest, EngineSettings, Header

ATTEMPTS = 3
"""Measurements of one cell while other processes disturb it; the last one counts, disturbed or not."""


def main(argv: Sequence[str]) -> None:
    """Measure and report; exits with an error when a system serves wrong outputs."""
    args = parse(argv)
    result, table = measure(args, argv)
    results.emit(result, [table], args.out)


def measure(args: argparse.Namespace, argv: Sequence[str]) -> tuple[results.Result, str]:
    """Measure, and return the result with its table.

    Raises:
        SystemExit: a system serves wrong outputs, or an engine failed.
    """
    try:
        run = _Run(args)
        result = run.measure(argv)
    except (report.WrongOutput, engine_process.CellFailed, ValueError) as error:
        raise SystemExit(f"engine_compare: {error}") from error
    return result, run.table()


class _Run:
    """One invocation: its requests, its capacity and the cells measured so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._model = Path(args.model) if args.model else tiny_model.build()
        self._requests = engine_requests.Cells(args, self._model)
        self._settings: dict[str, Any] = {}
        self._disturbed = 0
        self.reduced: dict[tuple[str, float], dict[str, float]] = {}

    def table(self) -> Table:
        """Return what was measured."""
        columns = engine_claims.SLO_COLUMNS if self._requests.have_objectives else engine_claims.COLUMNS
        return report.table(self.reduced, columns, ("load", "system"))

    def measure(self, argv: Sequence[str]) -> results.Result:
        """Measure capacity, then every cell, and assemble the result."""
        args = self._args
        capacity = {} if args.capacity is None else {"capacity_requests_per_s": args.capacity}
        if self._requests.to_calibrate or not capacity:
            capacity = self._capacity() | capacity
        cells = []
        for repeat in range(args.repeats):
            for load in args.loads:
                turn = repeat % len(args.systems)
                for system in args.systems[turn:] + args.systems[:turn]:
                    rate = load * capacity["capacity_requests_per_s"]
                    cells.append(self._cell(system, load, repeat, rate))
        order = {(s, load): None for load in args.loads for s in args.systems}
        reduced = report.reduce(cells)
        self.reduced = {key: reduced[key] for key in order}
        engine_claims.add_ratios(cells, self.reduced)
        metrics, baselines = report.flatten(self.reduced, rows.UPSTREAM, "load_{:g}")
        dataset = self._requests.dataset
        return results.Result(
            name="engine_compare",
            command=results.command(argv, __file__),
            config=self._config(),
            details={"engine": self._settings},
            seed=args.seed,
            workload=results.Workload(name=dataset.name, rows=len(dataset.rows), sha256=dataset.sha256),
            metrics={**capacity, **metrics},
            baselines=baselines,
            claims=engine_claims.claims(cells, self.reduced, args.workload, args.note),
        )

    def _capacity(self) -> dict[str, float]:
        """Measure what upstream carries, and before that, where requests have objectives, what it does when idle."""
        label = f"capacity ({rows.BASELINE}, all requests at once)"
        spec = self._requests.at_once(rows.BASELINE)
        phases = self._serve_undisturbed(label, spec)["phases"]
        if self._requests.to_calibrate:
            self._requests.calibration = slo.calibrate(*(phases[name]["requests"] for name in (slo.ALONE, slo.FULL)))
            progress(f"idle server: {self._requests.calibration}")
        lines = report.timelines(label, phases[MEASURED]["requests"])
        tokens_per_s = latency.saturated_tokens_per_s(lines)
        requests_per_s = tokens_per_s * len(lines) / sum(len(line.token_times_s) for line in lines)
        progress(f"{label}: {tokens_per_s:.0f} tokens/s = {requests_per_s:.2f} requests/s")
        return {"capacity_tokens_per_s": tokens_per_s, "capacity_requests_per_s": requests_per_s}

    def _cell(self, system: str, load: float, repeat: int, rate_per_s: float) -> report.Cell:
        args, label = self._args, f"{system} at load {load:g}, repeat {repeat}"
        with self._requests.cell(system, repeat, rate_per_s) as spec:
            observed = self._serve_undisturbed(label, spec)
        sent, phase = spec["phases"][-1]["requests"], observed["phases"][MEASURED]
        lines = report.timelines(label, phase["requests"])
        metrics = {
            **report.phase_metrics(label, phase, len(sent)),
            **observed["predictor"],
            "merged_token_fraction": _merged(lines),
            "engine_start_s": observed["engine_start_s"],
        }
        said = f"{metrics[report.NORMALISED]:.2f} ms/token, {metrics['mean_waiting_requests']:.1f} waiting"
        if self._requests.have_objectives:
            metrics |= engine_claims.slo_metrics(sent, lines)
            said += f", {metrics[engine_claims.ATTAINED]:.0%} met their objectives"
        progress(f"{label}: {said}")
        self._settings[system] = observed["settings"]
        cell = report.Cell(system=system, at=load, repeat=repeat, metrics=metrics)
        if args.record is not None:
            record(args.record, cell, self._model.name, sent, observed)
        return cell

    def _serve_undisturbed(self, label: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Serve a cell, again if other processes disturbed it; their share, not the outcome, decides."""
        limit = self._args.max_foreign_cores
        for attempt in range(1, ATTEMPTS + 1):
            observed = engine_process.serve(label, spec)
            foreign = observed["phases"][MEASURED]["foreign_cpu_cores"]
            if limit is None or foreign is None or foreign <= limit:
                break
            self._disturbed += 1
            progress(f"{label}: other processes used {foreign:.2f} cores, attempt {attempt} of {ATTEMPTS}")
        return observed

    def _config(self) -> dict[str, Any]:
        args = self._args
        return {
            "systems": {s: rows.system_args(s, args) for s in args.systems},
            **self._requests.facts(),
            "loads": args.loads,
            "repeats": args.repeats,
            "same_requests": args.same_requests,
            "requests_per_cell": args.num_requests,
            "warmup_requests": engine_requests.WARMUP_REQUESTS,
            "history_requests": args.history_requests,
            "arrivals": "Poisson, rate = load * capacity, same times for every system of a repeat",
            "capacity_from": "given" if args.capacity is not None else f"{rows.BASELINE}, saturated, measured first",
            "max_foreign_cores": args.max_foreign_cores,
            "disturbed_attempts": self._disturbed,
            "priority_by": args.priority_by,
            "model": self._model.name,
            "quick": args.quick,
        }


def _merged(lines: Sequence[latency.RequestTimeline]) -> float:
    """Return the share of tokens that came together with the one before."""
    merged = sum(b == a for line in lines for a, b in pairwise(line.token_times_s))
    return merged / sum(len(line.token_times_s) for line in lines)


def record(
    path: Path, cell: report.Cell, model: str, sent: Sequence[Mapping[str, Any]], observed: Mapping[str, Any]
) -> None:
    """Append a cell to a recording: what its scheduler was told and decided, and what the clients saw."""
    kept, phase = observed["record"], observed["phases"][MEASURED]
    versions = results.versions()
    versions.pop("commit", None)
    which: Any = {"system": cell.system, "load": cell.at, "repeat": cell.repeat}
    header = Header(
        **which,
        model=model,
        versions=versions,
        settings=EngineSettings(**kept["settings"]),
        client_start_s=phase["client_start_s"],
        facts={"machine": results.machine(), **cell.metrics},
    )
    requests = [
        ClientRequest(
            **which,
            req_id=got["req_id"],
            source_id=request["source_id"],
            arrival_s=got["arrival_s"],
            sent_s=round(got["sent_s"], 6),
            prompt_tokens=got["prompt_tokens"],
            output_tokens=got["output_tokens"],
            token_times_s=tuple(round(t, 6) for t in got["token_times_s"]),
        )
        for request, got in zip(sent, phase["requests"], strict=True)
    ]
    recording.append(path, header, kept["lines"], requests, dropped=kept["dropped"])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the command line; ends the process with a message if it is not usable."""
    options = parser(__doc__ or "")
    set_defaults(options, argv)
    args = options.parse_args(argv)
    args.systems = args.systems.split(",")
    args.loads = [float(load) for load in args.loads.split(",")]
    try:
        for system in set(args.systems) - set(rows.UPSTREAM):
            systems.resolve(rows.split(system)[0])
    except ValueError as error:
        options.error(f"--systems: {error}; upstream's own are {', '.join(rows.UPSTREAM)}")
    try:
        if args.calibration is not None:
            args.calibration = slo.Calibration(**args.calibration)
    except (TypeError, ValueError) as error:
        options.error(f"--calibration: {error}")
    makes_own = args.workload in rows.WITH_OBJECTIVES
    for refused, why in (
        (not args.tier_gib > 0, f"--tier-gib={args.tier_gib:g}: must be greater than 0"),
        (not args.slo_scale > 0, f"--slo-scale={args.slo_scale:g}: must be greater than 0"),
        (
            not makes_own and (args.calibration or args.priority_by == "ttft-slo"),
            f"--calibration and --priority-by=ttft-slo: the requests of --workload={args.workload} have no objectives",
        ),
        (
            makes_own and args.dataset is not None,
            f"--dataset: --workload={args.workload} makes its own requests; leave it out",
        ),
        (
            args.max_output_tokens >= args.max_model_len,
            "--max-output-tokens: must leave room for a prompt within --max-model-len",
        ),
    ):
        if refused:
            options.error(why)
    if args.record is not None:
        recording.start(args.record)
    return args


if __name__ == "__main__":
    main(sys.argv[1:])
