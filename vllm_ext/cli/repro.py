"""`vllm-ext repro`: measure a paper's figures again on the simulator."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ext.cli import kept_runs
from vllm_ext.config import ConfigError
from vllm_ext.observability import json_output, provenance, results
from vllm_ext.observability.provenance import check_committed, result_path

if TYPE_CHECKING:
    from vllm_ext.repro.study import Findings, Study

RESULTS = provenance.RESULTS / "repro"
DOCUMENT = Path("docs", "reproductions.md")


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    from vllm_ext.repro import catalogue

    args = _parser().parse_args(list(argv))
    try:
        if args.document:
            return _document(Path.cwd())
        studies = catalogue.studies()
        if args.list:
            for study in studies.values():
                print(f"{study.id:16} {study.title} ({study.paper})")
            return 0
        chosen = _chosen(args.id, studies)
    except ConfigError as error:
        print(f"vllm-ext repro: {error}", file=sys.stderr)
        return 2
    if args.out is not None and len(chosen) > 1:
        print("vllm-ext repro: --out: needs one id; several write to --out-dir", file=sys.stderr)
        return 2
    return max(_reproduce(study, args) for study in chosen)


def _chosen(wanted: Sequence[str], studies: dict[str, Study]) -> list[Study]:
    if not wanted:
        raise ConfigError("id", "", f"one of {', '.join(studies)}, several of them, or all")
    if list(wanted) == ["all"]:
        return list(studies.values())
    for name in wanted:
        if name not in studies:
            raise ConfigError("id", name, f"one of {', '.join(studies)}, or all")
    return [studies[name] for name in wanted]


def _reproduce(study: Study, args: argparse.Namespace) -> int:
    from vllm_ext.repro.bench import Bench, RunFailed
    from vllm_ext.repro.report import result, tables
    from vllm_ext.simulation.spec import SimulationSpec
    from vllm_ext.simulation.sweep.pools import local_pool
    from vllm_ext.simulation.sweep.store import Outcome, PointStore

    count = 0

    def report(spec: SimulationSpec, outcome: Outcome, stored: bool) -> None:
        nonlocal count
        count += 1
        rate = spec.workload.rate_per_s
        where = f"{spec.engine.system} on {spec.hardware.model}" + (f" at {rate:.4g} req/s" if rate else "")
        state = "kept from before" if stored else (outcome.error or "done")
        print(f"{study.id}: run {count}: {where}: {state}", file=sys.stderr, flush=True)

    out = args.out or (args.out_dir / f"{study.id}.json" if args.out_dir else None)
    try:
        if out is not None:  # studies before this one took their time
            check_committed(out)
        with PointStore(args.cache) as store, local_pool(args.jobs) as pool:
            bench = Bench(
                quick=args.quick, seed=args.seed, pool=pool, store=store, on_point=None if args.quiet else report
            )
            findings = study.run(bench)
        made = result(study, findings, command=_command(study, args), seed=args.seed, quick=args.quick)
        results.emit(made, tables(study, findings), out, as_json=args.json)
        if out is not None:
            _plot(findings, out)
    except (RunFailed, OSError, ValueError) as error:
        print(f"vllm-ext repro {study.id}: {error}", file=sys.stderr)
        return 1
    return 0


def _command(study: Study, args: argparse.Namespace) -> str:
    quick = " --quick" if args.quick else ""
    seed = f" --seed {args.seed}" if args.seed else ""
    return f"vllm-ext repro {study.id}{quick}{seed}"


def _plot(findings: Findings, out: Path) -> None:
    for plot in findings.plots:
        plot.draw(out.with_name(f"{out.stem}{plot.suffix}.png"))


def _document(root: Path) -> int:
    from vllm_ext.repro.report import documentation

    files = sorted((root / RESULTS).glob("*.json"))
    if not files:
        print(
            f"vllm-ext repro: --document: no results in {RESULTS} of this folder; run it in a checkout of vllm-ext, "
            f"after `vllm-ext repro ID --out-dir {RESULTS}`",
            file=sys.stderr,
        )
        return 1
    (root / DOCUMENT).write_text(documentation(files, root), encoding="utf-8")
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
