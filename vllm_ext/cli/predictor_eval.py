"""`vllm-ext predictor eval`: fit length predictors on one file of prompts and answers, measure them on another."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ext.cli import spec_flags
from vllm_ext.cli.spec_flags import UsageError
from vllm_ext.observability.provenance import result_path

if TYPE_CHECKING:
    from vllm_ext.observability.results import Result
    from vllm_ext.prediction.encoder import Encoder
    from vllm_ext.prediction.evaluation.compare import Comparison
    from vllm_ext.prediction.evaluation.online import Stretch
    from vllm_ext.prediction.evaluation.rows import DataSet, Examples

PROG = "vllm-ext predictor eval"
QUICK_ROWS = 300
"""Of each file, with ``--quick``."""
_TIMED_PROMPTS = 64


def main(argv: Sequence[str]) -> int:
    """Run the command; 0, or 2 if a flag or a file is wrong, 130 after Ctrl-C."""
    args = _parser().parse_args(list(argv))
    try:
        return _evaluate(args, argv)
    except (ValueError, OSError, ImportError) as error:
        return spec_flags.complain(PROG, error)
    except KeyboardInterrupt:
        return 130


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ran:
    """What was learned from and tested on."""

    train_set: DataSet
    test_set: DataSet
    train: Examples
    test: Examples
    known: int
    """Tested prompts left out because they were learned from."""
    encoder: str


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What came of it, by predictor."""

    scores: Mapping[str, Mapping[str, float]]
    latency_ms: Mapping[str, float]
    fit_s: Mapping[str, float]
    curve: Sequence[Stretch]


def _evaluate(args: argparse.Namespace, argv: Sequence[str]) -> int:
    from vllm_ext.observability import results
    from vllm_ext.prediction.encoder import Encoder
    from vllm_ext.prediction.evaluation import compare, tables
    from vllm_ext.prediction.evaluation.online import learning_curve

    names = _names(args)
    compare.check_names(names)  # told before anything is read
    encoder = Encoder(args.encoder, threads=args.threads, max_tokens=args.prompt_tokens, window=args.prompt_window)
    setting = compare.Setting(encoder=encoder, model=args.encoder, max_tokens=args.max_tokens, seed=args.seed)
    train_set, test_set = _read(args, encoder)
    train, test, known = _apart(args, train_set, test_set)
    train, test = _embedded((train, test), encoder, args.quiet)
    ran = _Ran(train_set=train_set, test_set=test_set, train=train, test=test, known=known, encoder=encoder.name)

    comparison = compare.Comparison(train=train, predictors=compare.predictors(names, setting))
    comparison.fit(_say_fitting(args.quiet), time.perf_counter)
    measured = _Measured(
        scores=comparison.scores(comparison.predict(test), test),
        latency_ms=_latency(comparison, test, encoder),
        fit_s=comparison.seconds,
        curve=learning_curve(test, warm=train, seed=args.seed) if args.curve else (),
    )
    shown = [_described(ran), tables.score_table(measured.scores, measured.latency_ms)]
    if measured.curve:
        shown.append(f"while serving, learning from each request:\n{tables.curve_table(measured.curve)}")
    results.emit(_result(args, argv, ran, measured), shown, args.out)
    return 0


def _names(args: argparse.Namespace) -> list[str]:
    from vllm_ext.prediction.evaluation.compare import NAMES, QUICK_TO_FIT

    if args.predictors is None:
        return list(QUICK_TO_FIT)
    return list(NAMES) if args.predictors == "all" else args.predictors.split(",")


def _read(args: argparse.Namespace, encoder: Encoder) -> tuple[DataSet, DataSet]:
    """Read what is learned from and what is tested on; the same object if they are the same rows."""
    from vllm_ext.prediction.evaluation.compare import same_unit
    from vllm_ext.prediction.evaluation.rows import LocalTokenizer, Tokenizer, read

    tokenizer: Tokenizer = LocalTokenizer.of(encoder)
    if args.tokenizer is not None:
        tokenizer = LocalTokenizer.load(args.tokenizer)
    limit = QUICK_ROWS if args.quick and args.max_rows is None else args.max_rows

    def of(path: Path, filters: Sequence[str], flag: str) -> DataSet:
        return read(
            path,
            tokenizer,
            where=_where(filters, flag),
            max_rows=limit,
            max_tokens=args.max_tokens,
            keep_repeated=args.keep_repeated,
            seed=args.seed,
        )

    test = of(args.dataset, args.dataset_where, "--dataset-where")
    if _same(args):
        return test, test
    train = of(args.train, args.train_where, "--train-where")
    same_unit(train, test)
    return train, test


def _same(args: argparse.Namespace) -> bool:
    if args.train is None:
        return True
    same_file: bool = args.train.exists() and args.dataset.exists() and args.train.samefile(args.dataset)
    return same_file and sorted(args.train_where) == sorted(args.dataset_where)


def _apart(args: argparse.Namespace, train: DataSet, test: DataSet) -> tuple[Examples, Examples, int]:
    """Return what to learn from, what to test on, and how many tested prompts were left out as they are known."""
    from vllm_ext.prediction.evaluation.compare import without_repeated
    from vllm_ext.prediction.evaluation.rows import split

    learned, tested = train.examples, test.examples
    if train is test:
        first, second = split(len(test), args.test_share, args.seed)
        learned, tested = test.examples.take(first), test.examples.take(second)
    if args.keep_repeated:
        return learned, tested, 0
    tested, known = without_repeated(tested, learned)
    return learned, tested, known


def _embedded(pair: tuple[Examples, Examples], encoder: Encoder, quiet: bool) -> tuple[Examples, Examples]:
    """Embed both, with a bar on a terminal."""
    from vllm_ext.observability.count_progress import CountProgress
    from vllm_ext.prediction.evaluation.compare import embedded

    train, test = pair
    total = len(train) + len(test)
    if quiet or not sys.stderr.isatty():
        return embedded(train, encoder), embedded(test, encoder)
    with CountProgress(total, label="embedding", unit="prompt") as bar:
        train = embedded(train, encoder, on_progress=bar.update)
        return train, embedded(test, encoder, on_progress=lambda done: bar.update(len(train) + done))


def _latency(comparison: Comparison, test: Examples, encoder: Encoder) -> dict[str, float]:
    """Wall milliseconds per prompt, one prompt at a time, of those that read the prompt."""
    from vllm_ext.prediction.evaluation.compare import OURS
    from vllm_ext.prediction.evaluation.latency import call_of, time_calls
    from vllm_ext.prediction.evaluation.proxy import PROXIES

    reading = {p.name: call_of(p, encoder) for p in comparison.predictors if p.name in OURS or p.name in PROXIES}
    if not reading:
        return {}
    timed = time_calls(reading, test.prompts.texts[:_TIMED_PROMPTS], batch=1)
    return {name: round(timing.mean_ms, 3) for name, timing in timed.items()}


def _say_fitting(quiet: bool) -> Callable[[str], None]:
    from vllm_ext.prediction.evaluation.compare import READING_TEXTS

    def say(name: str) -> None:
        if not quiet and name in READING_TEXTS:  # the others take a second
            print(f"{PROG}: fine-tuning {name}, which takes minutes", file=sys.stderr, flush=True)

    return say


def _described(ran: _Ran) -> str:
    """One line: what was learned from, what was tested on, and what was left out."""
    return (
        f"learned from {len(ran.train)} requests of {ran.train_set.name}, tested on {len(ran.test)} of "
        f"{ran.test_set.name}; {ran.known} tested prompts left out as they were learned from, "
        f"{ran.train_set.repeated} and {ran.test_set.repeated} repeated within the files; lengths in tokens of "
        f"{ran.test_set.tokenizer}"
    )


def _result(args: argparse.Namespace, argv: Sequence[str], ran: _Ran, measured: _Measured) -> Result:
    from vllm_ext.observability.results import Result, Workload
    from vllm_ext.prediction.evaluation import measures, tables
    from vllm_ext.prediction.evaluation.compare import OURS
    from vllm_ext.prediction.evaluation.learned import NEIGHBOURS

    flat: dict[str, float] = {}
    baselines: dict[str, dict[str, float]] = {}
    for name, scores in measured.scores.items():
        found = tables.metrics(scores)
        if name in measured.latency_ms:
            found["latency_per_prompt_ms"] = measured.latency_ms[name]
        if name in measured.fit_s:
            found["fit_s"] = round(measured.fit_s[name], 3)
        if name in OURS:
            flat |= {f"{name}.{metric}": value for metric, value in found.items()}
        else:
            baselines[name] = found
    for stretch in measured.curve:
        for name, scores in stretch.scores.items():
            found = {f"after_{stretch.served}.{metric}": value for metric, value in tables.metrics(scores).items()}
            if name in OURS:
                flat |= {f"{name}.{metric}": value for metric, value in found.items()}
            else:
                baselines.setdefault(name, {}).update(found)
    return Result(
        name="predictor_eval",
        command=spec_flags.command_line(PROG, argv),
        config={
            "train": _origin(ran.train_set, args.train_where or args.dataset_where, len(ran.train)),
            "test": _origin(ran.test_set, args.dataset_where, len(ran.test)),
            "same_rows": ran.train_set is ran.test_set,
            "test_share": args.test_share if ran.train_set is ran.test_set else None,
            "tested_prompts_known": ran.known,
            "tokenizer": ran.test_set.tokenizer,
            "encoder": ran.encoder,
            "threads": args.threads,
            "neighbours": NEIGHBOURS,
            "max_tokens": args.max_tokens,
            "bin_tokens": measures.BIN_TOKENS,
            "classes": measures.NUM_CLASSES,
        },
        seed=args.seed,
        workload=Workload(name=ran.test_set.name, rows=ran.test_set.rows, sha256=ran.test_set.sha256),
        metrics=flat,
        baselines=baselines,
    )


def _origin(data: DataSet, filters: Sequence[str], used: int) -> dict[str, Any]:
    return {
        "file": data.name,
        "sha256": data.sha256,
        "where": list(filters),
        "rows": data.rows,
        "repeated": data.repeated,
        "used": used,
    }


def _where(texts: Sequence[str], flag: str) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for text in texts:
        field, equals, values = text.partition("=")
        if not field or not equals or field in found:
            raise UsageError(f"{flag} {text}: must be FIELD=V1,V2, every field once")
        found[field] = frozenset(values.split(","))
    return found


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = spec_flags.Parser(
        prog=PROG,
        description="Compare length predictors: learn from some requests, predict others, measure. Tables go to "
        "standard error;\nthe last line of standard output is the result as JSON.",
    )
    data = parser.add_argument_group("data: files of prompts and answers (or output_tokens)")
    data.add_argument("--dataset", type=Path, required=True, metavar="FILE", help="what is predicted")
    data.add_argument("--train", type=Path, metavar="FILE", help="what is learned from (default: a part of --dataset)")
    for name, what in (("--dataset-where", "--dataset"), ("--train-where", "--train")):
        data.add_argument(
            name, action="append", default=[], metavar="FIELD=V1,V2", help=f"rows of {what} to keep; repeatable"
        )
    data.add_argument("--max-rows", type=_positive, metavar="N", help="rows of each file, drawn at random")
    data.add_argument("--test-share", type=float, default=0.3, metavar="X", help="of one file (default: 0.3)")
    data.add_argument("--keep-repeated", action="store_true", help="keep prompts that occur again, as traffic has them")
    data.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="folder of the tokenizer that counts (default: the encoder's)"
    )
    data.add_argument(
        "--max-tokens", type=_positive, default=4096, metavar="N", help="clients' bound on outputs (default: 4096)"
    )
    how = parser.add_argument_group("what is compared")
    how.add_argument("--predictors", metavar="A,B", help="names, or all (default: all but those that take minutes)")
    how.add_argument("--curve", action="store_true", help="also serve the tested requests in order, learning from each")
    how.add_argument("--encoder", metavar="NAME", help="sentence-transformers model, a folder or an id of the hub")
    how.add_argument(
        "--prompt-tokens", type=_positive, default=128, metavar="N", help="that are embedded (default: 128)"
    )
    how.add_argument("--prompt-window", default="head+tail", metavar="NAME", help="head, tail or head+tail (default)")
    how.add_argument("--threads", type=_positive, default=1, metavar="N", help="CPU threads (default: 1)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of samples, split and training (default: 0)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROWS} rows of each file")
    parser.add_argument("--out", type=result_path, metavar="FILE", help="also write the JSON result to FILE")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser
