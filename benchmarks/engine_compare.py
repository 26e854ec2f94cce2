"""Schedulers side by side on the real engine: how much latency does an order of service save when a queue forms?

Method: `AsyncLLM` on the CPU (or whatever vLLM runs on here) serves the embedded tiny model, or ``--model``. Every
system gets a fresh engine in a fresh process, the same prompts in the same order at the same Poisson arrival times,
and one constant ``max_tokens``; each request ends at the length of its recorded answer, which no policy can see
(`vllm_ext.observability.forced_length`). Loads are fractions of the capacity measured first: upstream, first come
first served, all requests at once, output tokens per second while every seat is taken. Repeats draw new requests and
arrivals and go round the systems, so that machine noise falls on all of them; metrics are medians over repeats,
ratios medians of the ratios within a repeat. A request that does not end at exactly its length fails the run.

A system's name alone predicts lengths from the history of finished requests. ``NAME@cold`` adds the predictor of
prompts, with an empty memory (it learns while it serves), ``NAME@warm`` one that learned from rows of the same dataset
that are not measured, as `vllm-ext predictor train` does it. Both wait until the predictor is ready before the clock
starts.

    python benchmarks/engine_compare.py --quick
    python benchmarks/engine_compare.py --dataset alpaca.jsonl.gz --dataset-where src=random9k,subset5k \\
        --max-foreign-cores 0.1 --out benchmarks/results/engine_compare.json

Output: a table on stderr; the last line on stdout is the result as JSON (see benchmarks/README.md).
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import engine_predictor
import engine_process
import engine_record
import engine_report as report
import engine_workload as workload

from vllm_ext import systems, tiny_model
from vllm_ext.config import ConfigError
from vllm_ext.observability import results
from vllm_ext.simulation import arrivals, datasets, latency, recording, synthetic

WARMUP_REQUESTS = 3
ATTEMPTS = 3
"""Measurements of one cell while other processes disturb it; the last one counts, disturbed or not."""
QUICK = {
    "systems": f"{report.BASELINE},oracle-alise",
    "loads": "0.9",
    "num_requests": 120,
    "history_requests": 20,
    "repeats": 1,
}


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
    return result, report.table(run.reduced)


class _Run:
    """One invocation: its requests, its capacity and the cells measured so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._model = Path(args.model) if args.model else tiny_model.build()
        self._dataset = _load(args)
        self._limits = workload.Limits(
            length_scale=args.length_scale,
            max_prompt_tokens=args.max_model_len - args.max_output_tokens,
            max_output_tokens=args.max_output_tokens,
        )
        draws = [self._draw(args.seed + repeat) for repeat in range(1 if args.same_requests else args.repeats)]
        self._lots = draws * args.repeats if args.same_requests else draws
        self._settings: dict[str, Any] = {}
        self._disturbed = 0
        self._learned = engine_predictor.Learned(self._model, args.warm_requests, args.seed)
        self.reduced: dict[tuple[str, float], dict[str, float]] = {}

    def measure(self, argv: Sequence[str]) -> results.Result:
        """Measure capacity, then every cell, and assemble the result."""
        args = self._args
        capacity = self._capacity() if args.capacity is None else {"capacity_requests_per_s": args.capacity}
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
        metrics, baselines = report.flatten(self.reduced)
        return results.Result(
            name="engine_compare",
            command=results.command(argv, "benchmarks/engine_compare.py"),
            config=self._config(),
            seed=args.seed,
            workload=results.Workload(
                name=self._dataset.name, rows=len(self._dataset.rows), sha256=self._dataset.sha256
            ),
            metrics={**capacity, **metrics},
            baselines=baselines,
            goals=report.goals(self.reduced, args.note),
        )

    def _draw(self, seed: int) -> workload.Lots:
        from transformers import AutoConfig, AutoTokenizer
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity(logging.ERROR)  # texts longer than the model's context are cut afterwards
        args = self._args
        tokenizer: Any = AutoTokenizer.from_pretrained(self._model)
        return workload.draw(
            self._dataset.rows,
            tokenizer,
            self._limits,
            vocab_size=AutoConfig.from_pretrained(self._model).vocab_size,
            counts=(WARMUP_REQUESTS, args.history_requests, args.num_requests),
            seed=seed,
        )

    def _capacity(self) -> dict[str, float]:
        label = f"capacity ({report.BASELINE}, all requests at once)"
        spec = self._spec(report.BASELINE, self._lots[0], [0.0] * self._args.num_requests)
        observed = self._serve_undisturbed(label, spec)
        lines = report.timelines(label, spec, observed)
        tokens_per_s = latency.saturated_tokens_per_s(lines)
        requests_per_s = tokens_per_s * len(lines) / sum(len(line.token_times_s) for line in lines)
        _progress(f"{label}: {tokens_per_s:.0f} tokens/s = {requests_per_s:.2f} requests/s")
        return {"capacity_tokens_per_s": tokens_per_s, "capacity_requests_per_s": requests_per_s}

    def _cell(self, system: str, load: float, repeat: int, rate_per_s: float) -> report.Cell:
        args, label = self._args, f"{system} at load {load:g}, repeat {repeat}"
        times = arrivals.poisson(
            rate_per_s=rate_per_s, count=args.num_requests, seed=args.seed + (0 if args.same_requests else repeat)
        )
        lots = self._lots[repeat]
        spec = self._spec(system, lots, [float(t) for t in times])
        with self._predictor(system, spec):
            observed = self._serve_undisturbed(label, spec)
        metrics = report.cell_metrics(label, spec, observed)
        self._settings[system] = observed["settings"]
        cell = report.Cell(system=system, load=load, repeat=repeat, metrics=metrics)
        if args.record is not None:
            engine_record.append(args.record, cell, self._model.name, lots, spec, observed)
        _progress(f"{label}: {metrics[report.NORMALISED]:.2f} ms/token, {metrics['mean_waiting_requests']:.1f} waiting")
        return cell

    def _spec(self, system: str, lots: workload.Lots, times: Sequence[float]) -> dict[str, Any]:
        zeros = [0.0] * (len(lots.warmup) + len(lots.history))
        return {
            "engine_args": {"model": str(self._model), **_engine_args(self._args), **_system_args(system, self._args)},
            "max_tokens": self._args.max_output_tokens,
            "record_steps": self._args.record is not None,
            "warmup": self._sendable(lots.warmup, zeros),
            "history": self._sendable(lots.history, zeros),
            "requests": self._sendable(lots.measured, times),
        }

    @contextmanager
    def _predictor(self, system: str, spec: dict[str, Any]) -> Iterator[None]:
        """Give the predictor of a cell a folder of its own, as long as it is measured."""
        state = engine_predictor.state_of(system)
        spec["predictor"] = state
        if state is None:
            yield
            return
        if state == engine_predictor.WARM:
            self._learned.prepare(self._dataset.rows, self._lots, self._limits)
        with self._learned.folder(state) as folder:
            spec["engine_args"]["additional_config"]["vllm_ext"]["predictor"]["folder"] = str(folder)
            yield

    def _sendable(self, requests: Sequence[workload.BenchRequest], times: Sequence[float]) -> list[dict[str, Any]]:
        by_length = self._args.priority_by == "prompt-length"
        return [
            {
                "prompt": r.prompt,
                "prompt_token_ids": r.prompt_token_ids,
                "output_tokens": r.output_tokens,
                "priority": len(r.prompt_token_ids) if by_length else 0,
                "arrival_s": time,
            }
            for r, time in zip(requests, times, strict=False)
        ]

    def _serve_undisturbed(self, label: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Serve a cell, again if other processes disturbed it; their share, not the outcome, decides."""
        limit = self._args.max_foreign_cores
        for attempt in range(1, ATTEMPTS + 1):
            observed = engine_process.serve(label, spec)
            foreign = observed["foreign_cpu_cores"]
            if limit is None or foreign is None or foreign <= limit:
                break
            self._disturbed += 1
            _progress(f"{label}: other processes used {foreign:.2f} cores, attempt {attempt} of {ATTEMPTS}")
        return observed

    def _config(self) -> dict[str, Any]:
        args = self._args
        return {
            "systems": {s: _system_args(s, args) for s in args.systems},
            "engine": self._settings,
            "loads": args.loads,
            "repeats": args.repeats,
            "same_requests": args.same_requests,
            "requests_per_cell": args.num_requests,
            "warmup_requests": WARMUP_REQUESTS,
            "history_requests": args.history_requests,
            "arrivals": "Poisson, rate = load * capacity, same times for every system of a repeat",
            "capacity_from": "given" if args.capacity is not None else f"{report.BASELINE}, saturated, measured first",
            "max_foreign_cores": args.max_foreign_cores,
            "disturbed_attempts": self._disturbed,
            "priority_by": args.priority_by,
            "limits": asdict(self._limits),
            "lengths": [workload.describe(lots.measured) for lots in self._lots],
            "dataset_format": self._dataset.format,
            "dataset_where": args.dataset_where,
            "dataset_skipped": self._dataset.skipped,
            "model": self._model.name,
            "quick": args.quick,
        }


def _load(args: argparse.Namespace) -> datasets.Dataset:
    if args.dataset is None:
        needed = WARMUP_REQUESTS + args.history_requests + args.num_requests
        spare = needed // 4 + 16  # short made-up prompts come out alike now and then, and each is used once
        return synthetic.generate(args.synthetic, rows=needed + spare, seed=args.seed)
    where = {}
    for condition in args.dataset_where:
        name, _, values = condition.partition("=")
        where[name] = frozenset(values.split(","))
    return datasets.load(args.dataset, args.dataset_format, where)


def _engine_args(args: argparse.Namespace) -> dict[str, Any]:
    """Engine settings common to all systems."""
    return {
        "block_size": args.block_size,
        "disable_log_stats": False,
        "dtype": args.dtype,
        "enable_prefix_caching": True,
        "enforce_eager": args.enforce_eager,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "hf_overrides": args.hf_overrides,
        "load_format": args.load_format,
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "num_gpu_blocks_override": args.num_gpu_blocks,
        "seed": 0,
    }


def _system_args(system: str, args: argparse.Namespace) -> dict[str, Any]:
    """Engine settings that make one system different from the others."""
    if system == report.BASELINE:
        return {}
    if system == "upstream-priority":
        return {"scheduling_policy": "priority"}
    options = copy.deepcopy(args.ext_config)
    name = engine_predictor.system_of(system)
    if systems.resolve(name).oracle:
        options["allow_oracle"] = True
    engine_predictor.choose_sources(system, options)
    return {"scheduler_cls": name, "additional_config": {"vllm_ext": options}}


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the command line; ends the process with a message if it is not usable."""
    from engine_options import parser

    options = parser(__doc__ or "")
    if "--quick" in argv:
        options.set_defaults(**QUICK)
    args = options.parse_args(argv)
    args.systems = args.systems.split(",")
    args.loads = [float(load) for load in args.loads.split(",")]
    try:
        for system in args.systems:
            if system not in report.UPSTREAM:
                systems.resolve(engine_predictor.system_of(system))
    except ConfigError as error:
        options.error(f"--systems: {error}; upstream's own are {', '.join(report.UPSTREAM)}")
    if args.max_output_tokens >= args.max_model_len:
        options.error("--max-output-tokens: must leave room for a prompt within --max-model-len")
    if args.record is not None:
        recording.start(args.record)
    return args


if __name__ == "__main__":
    main(sys.argv[1:])
