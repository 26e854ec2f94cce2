"""`vllm-ext predictor`: train, show, export, clear and judge what length prediction learned."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ext.cli.command import Parser, UsageError, guarded
from vllm_ext.cli.spec_flags import add_flags, command_line, given
from vllm_ext.config.model import made
from vllm_ext.config.prediction import PredictorConfig
from vllm_ext.report import common_flags
from vllm_ext.report.results import Result, Workload, emit
from vllm_ext.report.table import Table

if TYPE_CHECKING:
    from vllm_ext.prediction.encoder import Encoder
    from vllm_ext.prediction.rows import Rows

QUICK_ROWS = 300
"""Judged with ``--quick``."""
_CONFIG = "predictor."
_EMBEDDING = ("encoder", "prompt_tokens", "prompt_window", "system_chars")
_STORE = ("threads", "capacity", "max_mib", "keep_prompts")


def main(argv: Sequence[str]) -> int:
    """Run the command; 1 if `show` found damage. After Ctrl-C a batch is in the store or not, the regression whole."""
    return guarded(_parser(), lambda args: _ACTIONS[args.action](args), argv)


def _train(args: argparse.Namespace) -> int:
    from vllm_ext.prediction import evaluate
    from vllm_ext.prediction.folder import default_folder
    from vllm_ext.prediction.learned import LearnedPredictor
    from vllm_ext.report.count_progress import CountProgress

    config = _config(args)
    folder: Path = args.out or default_folder(args.model)
    _check_place(folder)
    encoder, rows = _encoder_and_rows(args, config, args.dataset, args.dataset_where)
    started_s = time.monotonic()
    with closing(LearnedPredictor(config, folder, encoder)) as predictor:
        if predictor.in_memory:
            raise OSError(f"{folder}: {predictor.in_memory}")
        before = predictor.status()["entries"]
        with CountProgress(len(rows.finished), label="learning", unit="prompt", quiet=args.quiet) as progress:
            evaluate.learn(predictor, rows.finished, progress.update)
        predictor.fit()
        status = predictor.status()
    metrics = {
        "rows": len(rows.finished),
        "rows_without_text": rows.without_text,
        "entries_before": before,
        "entries": status["entries"],
        "regression_examples": status["examples"],
        "learned_in_s": time.monotonic() - started_s,
    }
    result = _result(args, rows, metrics, encoder=encoder.name, folder=folder.name)
    table = Table(["learned", ""], list(metrics.items()))
    emit(result, [] if args.quiet else [table, *_units(rows), f"written to {folder}"])
    return 0


def _eval(args: argparse.Namespace) -> int:
    from vllm_ext.prediction import evaluate
    from vllm_ext.prediction.learned import LearnedPredictor
    from vllm_ext.report.count_progress import CountProgress

    config = _config(args)
    if args.quick and args.max_rows is None:
        args.max_rows = QUICK_ROWS
    encoder, rows = _encoder_and_rows(args, config, args.dataset, args.dataset_where)
    learned, tested = [], list(rows.finished)
    if args.train is not None:
        _, others = _encoder_and_rows(args, config, args.train, args.train_where, encoder)
        learned = list(others.finished)
    elif not args.online:
        learned, tested = evaluate.split(rows.finished, args.test_share, args.seed)
    history = evaluate.History()
    with (
        tempfile.TemporaryDirectory(prefix="vllm-ext-eval-") as place,
        closing(LearnedPredictor(config, Path(place), encoder)) as predictor,
        CountProgress(len(learned) + len(tested), label="judging", unit="prompt", quiet=args.quiet) as progress,
    ):
        evaluate.learn(predictor, learned, progress.update)
        history.learn(learned)
        if args.online:
            said = evaluate.judge_online(
                predictor, history, tested, progress=lambda done: progress.update(len(learned) + done)
            )
        else:
            predictor.fit()
            said = evaluate.judge_split(predictor, history, tested)
    parts = {"all": said, "first turns": said.where(said.turns == 0), "later turns": said.where(said.turns > 0)}
    found = {name: evaluate.scores(part) for name, part in parts.items() if len(part.true)}
    table = Table(
        ["requests", "n", *evaluate.MEASURES],
        [[name, len(parts[name].true), *(score[m] for m in evaluate.MEASURES)] for name, score in found.items()],
    )
    metrics = {f"{name.replace(' ', '_')}/{m}": value for name, score in found.items() for m, value in score.items()}
    counts = {"learned": len(learned), "judged": len(tested), "online": args.online}
    emit(_result(args, rows, metrics, encoder=encoder.name, **counts), [table, *_units(rows)], args.out)
    return 0


def _show(args: argparse.Namespace) -> int:
    from vllm_ext.prediction import show

    folder = _folder(args)
    found = show.describe(folder)
    for problem in found["problems"]:
        print(f"{args.parser.prog}: {' '.join(problem.split())}", file=sys.stderr)
    if args.json:
        print(json.dumps({"folder": str(folder), **found}))
    else:
        print(Table(["predictor", str(folder)], show.as_rows(found)))
    return 1 if found["problems"] else 0


def _export(args: argparse.Namespace) -> int:
    from vllm_ext.prediction import show

    count = show.export(_folder(args), args.out)
    print(f"{args.out}: {count} entries", file=sys.stderr)
    return 0


def _clear(args: argparse.Namespace) -> int:
    from vllm_ext.prediction.folder import clear

    folder = _folder(args)
    print(f"{folder}: {clear(folder)} files deleted", file=sys.stderr)
    return 0


_ACTIONS = {"train": _train, "eval": _eval, "show": _show, "export": _export, "clear": _clear}


# --- parts ------------------------------------------------------------------------------------------------------------


def _config(args: argparse.Namespace) -> PredictorConfig:
    """Return the service's configuration but for the flags; a whole batch is embedded before it is learned."""
    return made(PredictorConfig, {"batch_size": 512, "seed": args.seed, **given(args, _CONFIG)}, root="")


def _encoder_and_rows(
    args: argparse.Namespace, config: PredictorConfig, path: Path, filters: Sequence[str],
    encoder: Encoder | None = None,
) -> tuple[Encoder, Rows]:  # fmt: skip
    from vllm_ext.prediction import rows
    from vllm_ext.prediction.encoder import Encoder
    from vllm_ext.prediction.text import PromptText

    count = None if args.tokenizer is None else rows.token_counter(args.tokenizer)
    if encoder is None:
        window = config.prompt_window
        encoder = Encoder(config.encoder, threads=config.threads, max_tokens=config.prompt_tokens, window=window)
    found = rows.read(
        path,
        count or encoder.count_tokens,
        counter="word pieces of the encoder" if count is None else f"tokens of {args.tokenizer.resolve().name}",
        model=args.model,
        text=PromptText(max_tokens=config.prompt_tokens, system_chars=config.system_chars),
        format=args.dataset_format,
        where=_where(filters),
        max_rows=args.max_rows,
        turns=not args.first_turns,
        seed=args.seed,
    )
    return encoder, found


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


def _result(args: argparse.Namespace, rows: Rows, metrics: Mapping[str, float], **config: object) -> Result:
    return Result(
        name=f"predictor_{args.action}", command=command_line(args.command_line), seed=args.seed,
        config={**config, "lengths_counted_in": dict(rows.counted_in)},
        workload=Workload(name=rows.dataset.name, rows=len(rows.dataset.rows), sha256=rows.dataset.sha256),
        metrics={name: float(value) for name, value in metrics.items()},
    )  # fmt: skip


# --- flags ------------------------------------------------------------------------------------------------------------


def _count(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return number


def _parser() -> Parser:
    parser = Parser(
        prog="vllm-ext predictor",
        description="Train, show, export, clear and judge what length prediction learned. A predictor is a folder: "
        "a store of finished requests with their embeddings, and a regression fitted to them.",
    )
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    train = commands.add_parser("train", help="learn recorded prompts and answers, before or while serving")
    train.add_argument("--model", required=True, metavar="NAME", help="the served model, as `vllm serve NAME` has it")
    train.add_argument("--out", type=Path, metavar="FOLDER", help="default: the model's folder in the cache")
    judge = commands.add_parser("eval", help="judge predictions on recorded prompts")
    judge.add_argument("--train", type=Path, metavar="FILE", help="learn these instead of a part of the dataset")
    judge.add_argument("--train-where", action="append", default=[], metavar="FIELD=A,B", help="only these of them")
    judge.add_argument("--test-share", type=float, default=0.3, metavar="X", help="judged by (default: 0.3)")
    judge.add_argument("--online", action="store_true", help="serve all rows in order, each learned after it is judged")
    judge.set_defaults(model="")
    for learner, common in ((train, {}), (judge, {"out": "", "quick": f"at most {QUICK_ROWS} rows"})):
        _add_data(learner)
        add_flags(learner, PredictorConfig, _CONFIG, "embedding, as the server has it (predictor.*)", _EMBEDDING)
        add_flags(learner, PredictorConfig, _CONFIG, "store and regression", _STORE)
        common_flags.add(learner, "quiet", **common, seed="of samples and splits (default: 0)")
    for name, text in (
        ("show", "say what a predictor holds, and check it"),
        ("export", "write lengths, times and models for other tools"),
        ("clear", "delete what was learned"),
    ):
        action = commands.add_parser(name, help=text)
        action.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="the predictor's folder")
        action.add_argument("--model", metavar="NAME", help="instead: the predictor of this model in the cache")
        if name == "show":
            common_flags.add(action, json="print one JSON object")
        if name == "export":
            action.add_argument("--out", type=Path, required=True, metavar="FILE", help="ends in .jsonl or .csv")
    return parser


def _add_data(parser: Parser) -> None:
    data = parser.add_argument_group("what is read")
    data.add_argument("--dataset", type=Path, required=True, metavar="FILE", help="recorded prompts and answers")
    data.add_argument("--dataset-format", default="auto", metavar="NAME", help="format of the file (default: auto)")
    data.add_argument("--dataset-where", action="append", default=[], metavar="FIELD=A,B", help="only rows like these")
    data.add_argument("--max-rows", type=_count, metavar="N", help="a random sample of so many")
    data.add_argument("--first-turns", action="store_true", help="of a conversation, only the first turn")
    data.add_argument("--tokenizer", type=Path, metavar="PATH", help="of the served model (default: word pieces)")
