"""`vllm-ext repro`: measure a paper's figures again on the simulator."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ext.cli.command import FAILED, Failed, Parser, UsageError, guarded, need
from vllm_ext.report import common_flags, provenance, results
from vllm_ext.report.provenance import check_committed

if TYPE_CHECKING:
    from vllm_ext.experiments.experiment import Experiment, Findings

RESULTS = provenance.RESULTS / "repro"
DOCUMENT = Path("docs", "reproductions.md")


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    return guarded(_parser(), _repro, argv)


def _repro(args: argparse.Namespace) -> int:
    from vllm_ext.experiments import catalogue

    if args.document:
        return _document(Path.cwd())
    experiments = catalogue.experiments()
    if args.list:
        for experiment in experiments.values():
            print(f"{experiment.id:16} {experiment.title} ({experiment.paper})")
        return 0
    need("vllm")
    chosen = list(experiments) if args.id == ["all"] else args.id
    if unknown := [name for name in chosen or [""] if name not in experiments]:
        raise UsageError(f"id={unknown[0]!r}: must be one of {', '.join(experiments)}, several of them, or all")
    if len(chosen) > 1 and (args.out or args.html):
        raise UsageError(f"{'--out' if args.out else '--html'}: needs one id; several write to --out-dir")
    if args.stale:
        chosen = [name for name in chosen if _is_stale(args.out_dir or RESULTS, name)]
    return max((_reproduce(experiments[name], args) for name in chosen), default=0)


def _is_stale(folder: Path, name: str) -> bool:
    """Whether a folder has no result of a figure that was measured with these sources."""
    from vllm_ext.experiments.evidence import stale

    try:
        return stale(json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))) is not False
    except (OSError, ValueError, KeyError, TypeError):
        return True


def _reproduce(experiment: Experiment, args: argparse.Namespace) -> int:
    """Run one; what goes wrong is told, so that the others can follow."""
    from vllm_ext.experiments.data import Files, files_of
    from vllm_ext.experiments.evidence import Evidence
    from vllm_ext.experiments.merge import beside, merged
    from vllm_ext.experiments.report import page, result, tables
    from vllm_ext.experiments.runner import RunFailed, Runner
    from vllm_ext.report.page import write
    from vllm_ext.simulation.spec import SimulationSpec
    from vllm_ext.simulation.sweep.pools import local_pool
    from vllm_ext.simulation.sweep.store import Outcome, PointStore

    runs, evidence = itertools.count(1), Evidence()

    def tell(spec: SimulationSpec, outcome: Outcome, stored: bool) -> None:
        evidence.add(spec, outcome)
        if args.quiet:
            return
        rate = spec.workload.rate_per_s
        where = f"{spec.engine.system} on {spec.hardware.model}" + (f" at {rate:.4g} req/s" if rate else "")
        state = "kept from before" if stored else (outcome.error or "done")
        print(f"{experiment.id}: run {next(runs)}: {where}: {state}", file=sys.stderr, flush=True)

    out = args.out or (args.out_dir / f"{experiment.id}.json" if args.out_dir else None)
    try:
        if out is not None:  # experiments before this one took their time
            check_committed(out)
        with PointStore(args.cache) as store, local_pool(args.jobs) as pool:
            seeds = range(args.seed, args.seed + (1 if args.quick else args.repeats or experiment.repeats))

            def found(files: Files) -> Findings:
                shared = {"quick": args.quick, "pool": pool, "store": store, "on_point": tell, "files": files}
                runners = (Runner(seed=seed, judged_only=seed > args.seed, **shared) for seed in seeds)
                return merged({runner.seed: experiment.run(runner) for runner in runners})

            files = Files({}) if args.data is None else files_of(args.data)
            findings = found(files)
            if args.data is not None:
                findings = beside(found(Files({})) if files.served else findings, findings, files.served)
        findings = replace(findings, config={**findings.config, **evidence.config(experiment)})
        if args.quick and experiment.paper:
            findings = replace(findings, claims=())  # a trace of minutes has said twice what the full run says
        said = {
            "--data DIR": args.data, "--quick": args.quick, f"--seed {args.seed}": args.seed,
            f"--repeats {args.repeats}": args.repeats,
        }  # fmt: skip
        command = " ".join([args.parser.prog, experiment.id, *(flag for flag, given in said.items() if given)])
        made = result(experiment, findings, command=command, seed=args.seed, quick=args.quick)
        results.emit(made, tables(experiment, findings), out, as_json=args.json)
        if out is not None:
            for plot in findings.plots:
                plot.draw(out.with_name(f"{out.stem}{plot.suffix}.png"))
        if args.html is not None:
            write(page(experiment, findings, made), args.html)
    except BrokenPipeError:
        raise
    except (RunFailed, OSError, ValueError) as error:
        print(f"{args.parser.prog} {experiment.id}: {error}", file=sys.stderr)
        return FAILED
    return 0


def _document(root: Path) -> int:
    from vllm_ext.experiments import catalogue
    from vllm_ext.experiments.report import documentation

    files = sorted((root / RESULTS).glob("*.json"))
    if not files:
        raise Failed(
            f"--document: no results in {RESULTS} of this folder; run it in a checkout of vllm-ext, "
            f"after `vllm-ext repro ID --out-dir {RESULTS}`"
        )
    (root / DOCUMENT).write_text(documentation(files, catalogue.experiments()), encoding="utf-8")
    print(f"{DOCUMENT}: {len(files)} reproductions")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="vllm-ext repro",
        description="Measure figures and tables of papers again: real schedulers on simulated hardware.",
    )
    parser.add_argument("id", nargs="*", help="reproductions to run, or all")
    parser.add_argument("--list", action="store_true", help="list them")
    parser.add_argument("--repeats", type=common_flags.at_least(1), metavar="N",
                        help="seeds, from --seed on (default: what the figure needs; --quick: 1)")  # fmt: skip
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="serve real lengths beside the drawn ones, where a figure has one of the data sets alpaca, sharegpt, "
        "arxiv, burstgpt, mooncake, wmt and sst: its file NAME.*, or else the only NAME_*, in DIR or below it",
    )
    parser.add_argument(
        "--stale",
        action="store_true",
        help="only those whose result in --out-dir was measured with other sources, or is not there",
    )
    parser.add_argument("--out-dir", type=common_flags.output_folder, metavar="DIR", help="write DIR/ID.json for each")
    parser.add_argument("--document", action="store_true", help=f"in a checkout: make {DOCUMENT} from {RESULTS}")
    common_flags.add(
        parser, "seed", "jobs", "cache", "json", "html", quiet="no line per simulation",
        quick="the same table from shorter traces, some minutes each; too short to be held against the paper",
        out="write the result to FILE, plots beside it",
    )  # fmt: skip
    return parser
