"""`vllm-ext cellular`: serve models of cells, train and profile small ones, show what cellular batching does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_ext.cellular.models import Model
    from vllm_ext.cellular.options import EngineOptions

KINDS = ("lstm", "seq2seq", "treelstm", "rnnt")
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_PROBLEM = 2


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    args = _parser().parse_args(list(argv))
    try:
        status: int = args.run(args)
    except (ValueError, OSError) as error:
        print(f"vllm-ext cellular {args.action}: {error}", file=sys.stderr)
        return _PROBLEM
    return status


def _serve(args: argparse.Namespace) -> int:
    import uvicorn

    from vllm_ext.cellular.engine import CellularEngine
    from vllm_ext.cellular.garbage import freeze
    from vllm_ext.cellular.serving import create_app

    model = _model(args.model, args.seed)
    options = _options(model, args)
    with CellularEngine(model, options, compute=_compute(args.compile, args.device)) as engine:
        app = create_app(engine, default_slo_ms=args.default_slo_ms, max_sessions=args.max_sessions)
        freeze()
        print(f"serving {model.kind} {model.config} at http://{args.host}:{args.port}/v1/infer", file=sys.stderr)
        uvicorn.run(app, host=args.host, port=args.port, log_level="warning")
        return 0 if engine.healthy else 1


def _train(args: argparse.Namespace) -> int:
    from vllm_ext.cellular.models import save
    from vllm_ext.cellular.train import trained

    model, right = trained(args.model, seed=args.seed, steps=args.steps, **_sizes(args.size))
    save(model, args.out)
    print(f"{args.out}: {args.model} {model.config}, {right:.1%} of the last answers were right")
    return 0


def _profile(args: argparse.Namespace) -> int:
    from vllm_ext.cellular import executor, profile
    from vllm_ext.report.table import Table

    model = _model(args.model, args.seed)
    for module in model.modules.values():
        module.to(args.device)
    compute = _compute(args.compile, args.device)
    executor.prepare(compute, [replace(cell, batch_sizes=tuple(sorted(args.batches))) for cell in model.cells])
    found = {
        cell.name: profile.measure(cell, args.batches, repeats=args.repeats, compute=compute) for cell in model.cells
    }
    rows = [[f"{batch}", *(one.seconds[batch] * 1e3 for one in found.values())] for batch in sorted(args.batches)]
    rows.append(["knee", *(one.knee for one in found.values())])
    rows.append(["best", *(one.best for one in found.values())])
    print(Table(["batch", *(f"{name} (ms)" for name in found)], rows))
    if args.out:
        profile.save(model, found, args.out)
        print(f"{args.out}\nuse it: vllm-ext cellular serve {args.model} --profile {args.out}")
    return 0


def _demo(args: argparse.Namespace) -> int:
    from vllm_ext.cli import cellular_demo

    print(cellular_demo.shown(max_batch=args.max_batch))
    return 0


def _model(name: str, seed: int) -> Model:
    """Return the model of a file, or a small one that is trained now."""
    from vllm_ext.cellular.models import ModelError, load
    from vllm_ext.cellular.train import trained

    if name in KINDS:
        print(f"training a small {name}, which takes some seconds", file=sys.stderr)
        return trained(name, seed=seed)[0]
    if not Path(name).is_file():
        raise ModelError(f"model={name!r}: must be a file of weights, or one of {', '.join(KINDS)}")
    return load(Path(name))


def _options(model: Model, args: argparse.Namespace) -> EngineOptions:
    from vllm_ext.cellular import profile
    from vllm_ext.cellular.options import EngineOptions

    options = EngineOptions(
        workers=args.workers, max_requests=args.max_requests, max_tasks_to_submit=args.max_tasks_to_submit,
        order=args.order, cells=args.cells, device=args.device, state_bytes=args.state_mib << 20,
        max_batch=_sizes(args.max_batch),
    )  # fmt: skip
    if args.profile is None:
        return options
    found = profile.load(model, args.profile)
    best = {name: one.best for name, one in found.items()} | dict(options.max_batch or {})
    steps = {name: one.seconds[one.best] for name, one in found.items()}
    return replace(options, max_batch=best, step_s=steps)


def _compute(compiled: bool, device: str) -> Any:
    """Return how cells are called: as CUDA graphs on a CUDA device, unless they are to be compiled."""
    from vllm_ext.cellular.cells import Cell

    if not compiled and device.startswith("cuda"):
        from vllm_ext.cellular.graphed import GraphedCells

        return GraphedCells(device)
    if not compiled:
        return Cell.call
    if device == "cpu":
        raise ValueError(
            "compile=True: must be left out with device='cpu', where it is slower and delays first batches"
        )
    import torch

    kept: dict[str, Any] = {}

    def call(cell: Cell, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if cell.name not in kept:
            kept[cell.name] = torch.compile(cell.module, dynamic=True)
        found = kept[cell.name](*inputs)
        return found if isinstance(found, tuple) else (found,)

    return call


def _sizes(pairs: Sequence[str]) -> Mapping[str, int]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not value.isdecimal():
            raise ValueError(f"{pair!r}: must be NAME=NUMBER")
        found[name] = int(value)
    return found


def _batches(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers from 1 on, separated by commas")
    return sorted({int(part) for part in parts})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-ext cellular", description="Serve models of many small steps, batched at every step (BatchMaker)."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        return made

    serve = action("serve", _serve, "serve a model over HTTP")
    profile = action("profile", _profile, "measure each cell's time by batch, and the batch from which it grows")
    train = action("train", _train, "train a small model and write its weights")
    demo = action("demo", _demo, "show in a table what joins and leaves when, beside padded batching")
    for one in (serve, profile):
        one.add_argument("model", help=f"file of weights, or {', '.join(KINDS)}: a small one is trained on the spot")
        one.add_argument("--device", default="cpu", help="device of weights and values (default: %(default)s)")
        one.add_argument("--compile", action="store_true", help="compile the cells with torch.compile; not on a CPU")
    train.add_argument("model", choices=KINDS)
    train.add_argument("--out", type=Path, required=True, metavar="FILE", help="file in safetensors to write")
    train.add_argument("--steps", type=int, default=400, help="training steps (default: %(default)s)")
    train.add_argument("--size", action="append", default=[], metavar="NAME=NUMBER", help="such as hidden=128")
    for one in (serve, profile, train):
        one.add_argument("--seed", type=int, default=0, help="of the training (default: %(default)s)")
    profile.add_argument("--batches", type=_batches, default=list(_BATCHES), help="such as 1,64,512")
    profile.add_argument("--repeats", type=int, default=7, help="times each is measured (default: %(default)s)")
    profile.add_argument("--out", type=Path, metavar="FILE", help="write the profile to FILE")
    demo.add_argument("--max-batch", type=int, default=4, help="largest batch (default: %(default)s)")
    _add_serving(serve)
    return parser


def _add_serving(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--profile", type=Path, metavar="FILE", help="largest batches and step times from a profile")
    serve.add_argument(
        "--max-batch", action="append", default=[], metavar="CELL=NUMBER", help="largest batch of a cell"
    )
    serve.add_argument("--max-tasks-to-submit", type=int, default=5, help="tasks of a series (default: %(default)s)")
    serve.add_argument("--order", default="arrival", help="arrival, or slack: least slack first (default: %(default)s)")
    serve.add_argument(
        "--cells", metavar="WHICH",
        help="published: as in BatchMaker's Algorithm 1, or alternate: in turns (default: alternate with one worker)",
    )  # fmt: skip
    serve.add_argument("--workers", type=int, default=1, help="threads that compute (default: %(default)s)")
    serve.add_argument(
        "--max-requests", type=int, default=4096, help="open at once; more get 503 (default: %(default)s)"
    )
    serve.add_argument("--max-sessions", type=int, default=1024, help="open sessions (default: %(default)s)")
    serve.add_argument("--state-mib", type=int, default=4096, help="for values between cells (default: %(default)s)")
    serve.add_argument("--default-slo-ms", type=float, help="objective of requests that name none")
