"""`vllm-ext repro`: measure a paper's figures again on the simulator."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ext.cli import kept_runs
from vllm_ext.cli.exit_status import FAILED
from vllm_ext.cli.missing import need
from vllm_ext.report import json_output, provenance, results
from vllm_ext.report.provenance import check_committed, result_path

if TYPE_CHECKING:
    from vllm_ext.experiments.experiment import Experiment

RESULTS = provenance.RESULTS / "repro"
DOCUMENT = Path("docs", "reproductions.md")


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    from vllm_ext.experiments import catalogue

    args = _parser().parse_args(list(argv))
    if args.document:
        return _document(Path.cwd())
    experiments = catalogue.experiments()
    if args.list:
        for experiment in experiments.values():
            print(f"{experiment.id:16} {experiment.title} ({experiment.paper})")
        return 0
    need("vllm")
    chosen = list(experiments) if args.id == ["all"] else args.id
    problem = ""
    if unknown := [name for name in chosen or [""] if name not in experiments]:
        problem = f"id={unknown[0]!r}: must be one of {', '.join(experiments)}, several of them, or all"
    elif args.out is not None and len(chosen) > 1:
        problem = "--out: needs one id; several write to --out-dir"
    if problem:
        print(f"vllm-ext repro: {problem}", file=sys.stderr)
        return 2
    return max(_reproduce(experiments[name], args) for name in chosen)


def _reproduce(experiment: Experiment, args: argparse.Namespace) -> int:
    from vllm_ext.experiments.report import result, tables
    from vllm_ext.experiments.runner import RunFailed, Runner
    from vllm_ext.simulation.spec import SimulationSpec
    from vllm_ext.simulation.sweep.pools import local_pool
    from vllm_ext.simulation.sweep.store import Outcome, PointStore

    runs = itertools.count(1)

    def report(spec: SimulationSpec, outcome: Outcome, stored: bool) -> None:
        rate = spec.workload.rate_per_s
        where = f"{spec.engine.system} on {spec.hardware.model}" + (f" at {rate:.4g} req/s" if rate else "")
        state = "kept from before" if stored else (outcome.error or "done")
        print(f"{experiment.id}: run {next(runs)}: {where}: {state}", file=sys.stderr, flush=True)

    out = args.out or (args.out_dir / f"{experiment.id}.json" if args.out_dir else None)
    try:
        if out is not None:  # experiments before this one took their time
            check_committed(out)
        with PointStore(args.cache) as store, local_pool(args.jobs) as pool:
            runner = Runner(
                quick=args.quick, seed=args.seed, pool=pool, store=store, on_point=None if args.quiet else report
            )
            findings = experiment.run(runner)
        quick, seed = " --quick" if args.quick else "", f" --seed {args.seed}" if args.seed else ""
        command = f"vllm-ext repro {experiment.id}{quick}{seed}"
        made = result(experiment, findings, command=command, seed=args.seed, quick=args.quick)
        results.emit(made, tables(experiment, findings), out, as_json=args.json)
        if out is not None:
            for plot in findings.plots:
                plot.draw(out.with_name(f"{out.stem}{plot.suffix}.png"))
    except (RunFailed, OSError, ValueError) as error:
        print(f"vllm-ext repro {experiment.id}: {error}", file=sys.stderr)
        return FAILED
    return 0


def _document(root: Path) -> int:
    from vllm_ext.experiments import catalogue
    from vllm_ext.experiments.report import documentation

    files = sorted((root / RESULTS).glob("*.json"))
    if not files:
        print(
            f"vllm-ext repro: --document: no results in {RESULTS} of this folder; run it in a checkout of vllm-ext, "
            f"after `vllm-ext repro ID --out-dir {RESULTS}`",
            file=sys.stderr,
        )
        return FAILED
    (root / DOCUMENT).write_text(documentation(files, catalogue.experiments()), encoding="utf-8")
    print(f"{DOCUMENT}: {len(files)} reproductions")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-ext repro",
        description="Measure figures and tables of papers again: real schedulers on simulated hardware.",
    )
    parser.add_argument("id", nargs="*", help="reproductions to run, or all")
    parser.add_argument("--list", action="store_true", help="list them")
    parser.add_argument("--quick", action="store_true", help="the same table from shorter traces, below a minute each")
    parser.add_argument("--out", type=result_path, metavar="FILE", help="write the result to FILE, plots beside it")
    parser.add_argument("--out-dir", type=result_path, metavar="DIR", help="write DIR/ID.json for each")
    parser.add_argument("--seed", type=int, default=0, help="seed of every random generator (default: 0)")
    kept_runs.add_arguments(parser)
    json_output.add_argument(parser)
    parser.add_argument("--quiet", action="store_true", help="no line per simulation")
    parser.add_argument("--document", action="store_true", help=f"in a checkout: make {DOCUMENT} from {RESULTS}")
    return parser
