"""`vllm-ext cellular`: serve models of cells, train and profile small ones, show what cellular batching does."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ext.cellular.options import EngineOptions
from vllm_ext.cli.command import Parser, guarded
from vllm_ext.cli.spec_flags import add_flags, given
from vllm_ext.report import common_flags

if TYPE_CHECKING:
    from vllm_ext.cellular.models import Model

KINDS = ("lstm", "seq2seq", "treelstm", "rnnt")
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_ENGINE = "engine."


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    return guarded(_parser(), lambda args: args.run(args), argv)


def _serve(args: argparse.Namespace) -> int:
    import uvicorn

    from vllm_ext.cellular.engine import CellularEngine
    from vllm_ext.cellular.garbage import freeze
    from vllm_ext.cellular.serving import create_app

    options = _options(args)
    model = _model(args.model, args.seed)
    if args.profile is not None:
        options = _profiled(options, model, args.profile)
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
    executor.prepare(compute, [replace(cell, batch_sizes=tuple(args.batches)) for cell in model.cells])
    measure = functools.partial(profile.measure, batches=args.batches, repeats=args.repeats, compute=compute)
    found = {cell.name: measure(cell) for cell in model.cells}
    rows = [[f"{batch}", *(one.seconds[batch] * 1e3 for one in found.values())] for batch in args.batches]
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


def _options(args: argparse.Namespace) -> EngineOptions:
    return EngineOptions(
        device=args.device, state_bytes=args.state_mib << 20, max_batch=_sizes(args.max_batch), **given(args, _ENGINE)
    )


def _profiled(options: EngineOptions, model: Model, path: Path) -> EngineOptions:
    """Return the options with a profile's largest batches, where none were given, and its step times."""
    from vllm_ext.cellular import profile

    found = profile.load(model, path)
    best = {name: one.best for name, one in found.items()} | dict(options.max_batch or {})
    return options.changed(max_batch=best, step_s={name: one.seconds[one.best] for name, one in found.items()})


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

    compiled_of = functools.cache(lambda module: torch.compile(module, dynamic=True))

    def call(cell: Cell, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        found = compiled_of(cell.module)(*inputs)
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


def _parser() -> Parser:
    parser = Parser(
        prog="vllm-ext cellular", description="Serve models of many small steps, batched at every step (BatchMaker)."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, run: Any, text: str) -> Parser:
        made: Parser = actions.add_parser(name, help=text, description=text)
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
    train.add_argument("--steps", type=int, default=400, metavar="N", help="training steps (default: %(default)s)")
    train.add_argument("--size", action="append", default=[], metavar="NAME=NUMBER", help="such as hidden=128")
    profile.add_argument("--batches", type=_batches, default=list(_BATCHES), metavar="N,M", help="such as 1,64,512")
    profile.add_argument(
        "--repeats", type=common_flags.at_least(1), default=7, metavar="N", help="measurements of each (default: 7)"
    )
    profile.add_argument("--out", type=Path, metavar="FILE", help="write the profile to FILE")
    demo.add_argument("--max-batch", type=int, default=4, metavar="N", help="largest batch (default: %(default)s)")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    serve.add_argument("--port", type=int, default=8000, metavar="N", help="its port (default: %(default)s)")
    serve.add_argument("--profile", type=Path, metavar="FILE", help="largest batches and step times from a profile")
    serve.add_argument("--max-sessions", type=int, default=1024, metavar="N", help="open sessions (default: 1024)")
    serve.add_argument("--default-slo-ms", type=float, metavar="MS", help="objective of requests that name none")
    serve.add_argument("--max-batch", action="append", default=[], metavar="CELL=N", help="largest batch of a cell")
    serve.add_argument(
        "--state-mib", type=int, default=4096, metavar="N", help="for values between cells (default: 4096)"
    )
    add_flags(serve, EngineOptions, _ENGINE, "engine")
    serve.flag_of["state_bytes"] = "--state-mib"
    for one in (serve, profile, train):
        common_flags.add(one, seed="of the training (default: 0)")
    return parser
