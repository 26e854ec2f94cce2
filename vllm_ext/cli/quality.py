"""`vllm-ext quality MODEL`: does KV in 8 bits change this model's answers on these texts?"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ext.cli.command import Failed, Parser, UsageError, guarded, need
from vllm_ext.cli.spec_flags import command_line
from vllm_ext.config.kv_tier import BLOCK_TOKENS
from vllm_ext.report import common_flags, results
from vllm_ext.report.count_progress import CountProgress
from vllm_ext.report.page import Chart, Page, Section, Verdict, facts_of, write
from vllm_ext.report.plots import Series, lines
from vllm_ext.report.table import Table

if TYPE_CHECKING:
    from vllm_ext.datasets import TextFile
    from vllm_ext.quality.model import Loaded
    from vllm_ext.quality.outputs import Outputs
    from vllm_ext.quality.texts import Sequences
    from vllm_ext.quality.traffic import Traffic

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
EXACT, OURS, FP8, BFLOAT16 = "exact", "int8", "fp8_e4m3", "bfloat16"
_LABELS = {
    EXACT: "exact", OURS: "8 bits, as --kv-tier-bits 8", FP8: "fp8_e4m3, as --kv-cache-dtype fp8", BFLOAT16: "bfloat16"
}  # fmt: skip
_SHOWN = {
    "perplexity": "perplexity", "change %": "perplexity_change_percent", "from": "perplexity_change_low_percent",
    "to": "perplexity_change_high_percent", "mean log-prob.": "logprob_mean_nats",
    "same top token": "top_token_same_share", "same greedy tokens": "greedy_same_share",
    "same until token": "greedy_before_first_difference_median_tokens",
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run the command; 0 passes, 1 does not, 2 if a flag, the model or the texts are wrong, 3 failed."""
    return guarded(_parser(), _quality, argv)


def _quality(args: argparse.Namespace) -> int:
    need("transformers")
    import torch

    from vllm_ext.quality.kv_formats import NoRecord

    try:
        return _judge(args)
    except NoRecord as error:
        raise Failed(f"{args.model}: {error}") from error
    except torch.OutOfMemoryError as error:
        raise Failed(f"not enough memory for {args.tokens} --tokens: {str(error).splitlines()[0]}") from error


def _judge(args: argparse.Namespace) -> int:
    from vllm_ext.datasets import load_texts
    from vllm_ext.quality import gate, model, texts, traffic

    if args.texts is None:
        raise UsageError(
            "--texts: needed: a .txt, JSON lines with 'text' or 'prompt', or what --trace takes with texts"
        )
    if args.tokens < 2 * args.block_size:
        raise UsageError(
            f"--tokens {args.tokens}: must be at least two blocks ({2 * args.block_size}): one half is kept"
        )
    if args.sequences < texts.MIN_SEQUENCES:
        raise UsageError(f"--sequences {args.sequences}: must be at least {texts.MIN_SEQUENCES}")
    file = load_texts(args.texts)
    found = model.load(args.model, args.dtype, args.device)
    if found.max_tokens is not None and args.tokens > found.max_tokens:
        raise UsageError(f"--tokens {args.tokens}: {args.model} takes at most {found.max_tokens}")
    served = None if args.request_log is None else traffic.read(args.request_log, found.count, args.model)
    rows = texts.sequences(file.texts, found.encode, tokens=args.tokens, count=args.sequences, seed=args.seed)
    outputs = _outputs(args, found, rows)
    lengths, why_not = ({}, "") if served is None else _lengths(args, served)
    made = _result(args, found, file, rows, outputs, lengths)
    verdict = gate.verdict(made.metrics)
    notes = [f"{rows.too_short} texts of fewer than {args.tokens} tokens were left out"] if rows.too_short else []
    if len(rows.rows) < args.sequences:
        notes.append(f"the texts hold {len(rows.rows)} of the {args.sequences} --sequences")
    if why_not:
        notes.append(f"the predictor of prompts was not judged: {why_not}")
    tables = [_formats(args, made), *([_predictors(lengths, served)] if served is not None else [])]
    results.emit(made, [*tables, *notes, verdict], args.out, as_json=args.json)
    if args.html is not None:
        write(_page(made, outputs, tables, notes, verdict), args.html)
    return 0 if made.claims[0].met else 1


# --- measuring --------------------------------------------------------------------------------------------------------


def _outputs(args: argparse.Namespace, found: Loaded, rows: Sequences) -> dict[str, Outputs]:
    import torch

    from vllm_ext.quality import kv_formats
    from vllm_ext.quality.outputs import BATCH, outputs

    dtype = found.model.dtype
    formats = {EXACT: kv_formats.exact, OURS: kv_formats.int8(args.block_size, dtype), FP8: kv_formats.fp8_e4m3}
    if dtype == torch.float32:
        formats[BFLOAT16] = kv_formats.bfloat16
    kept = args.tokens // 2 // args.block_size * args.block_size
    batches = len(formats) * -(-len(rows.rows) // BATCH)
    with CountProgress(batches, label="computing", unit="part", quiet=args.quiet) as progress:
        made = outputs(found.model, rows.rows, formats, kept_tokens=kept, greedy_tokens=args.greedy_tokens,
                       greedy=formats, progress=progress.update)  # fmt: skip
    if not made[EXACT].logprobs.isfinite().all():
        raise Failed(f"{args.model}: its output with exact KV is not finite in {dtype}: try another --dtype")
    return made


def _lengths(args: argparse.Namespace, served: Traffic) -> tuple[dict[str, dict[str, float]], str]:
    from vllm_ext.quality.traffic import judged

    with CountProgress(len(served.finished), label="predicting", unit="request", quiet=args.quiet) as progress:
        return judged(served, progress.update)


def _result(
    args: argparse.Namespace, found: Loaded, file: TextFile, rows: Sequences, outputs: Mapping[str, Outputs],
    lengths: Mapping[str, Mapping[str, float]],
) -> results.Result:  # fmt: skip
    from vllm_ext.quality.gate import perplexity_claim
    from vllm_ext.quality.outputs import changes

    by_format = {name: changes(one, outputs[EXACT], args.seed) for name, one in outputs.items()}
    ours = by_format.pop(OURS)
    facts = f"8-bit KV, {len(rows.rows)} sequences of {args.tokens} tokens"
    predicted = {f"{name}/{measure}": value for name, one in lengths.items() for measure, value in one.items()}
    return results.Result(
        name="quality", command=command_line(args.command_line), seed=args.seed,
        config={
            "model": results.without_folder(args.model), "dtype": str(found.model.dtype).removeprefix("torch."),
            "device": found.model.device.type, "tokens": args.tokens, "block_tokens": args.block_size,
            "greedy_tokens": args.greedy_tokens, "texts_used": rows.texts, "texts_too_short": rows.too_short,
        },
        workload=results.Workload(name=file.name, rows=len(file.texts), sha256=file.sha256),
        metrics={"sequences": float(len(rows.rows)), **ours, **predicted}, baselines=by_format,
        claims=[perplexity_claim(ours, facts)],
    )  # fmt: skip


# --- showing ----------------------------------------------------------------------------------------------------------


def _formats(args: argparse.Namespace, made: results.Result) -> Table:
    by_format = {EXACT: made.baselines[EXACT], OURS: made.metrics, **made.baselines}
    rows = [[_LABELS[name], *(one.get(key) for key in _SHOWN.values())] for name, one in by_format.items()]
    title = f"{args.greedy_tokens} greedy tokens; from..to: 95 % interval, bootstrap over sequences"
    return Table(["KV of the first half", *_SHOWN], rows, title=title)


def _predictors(lengths: Mapping[str, Mapping[str, float]], served: Traffic) -> Table:
    measures = list(next(iter(lengths.values())))
    title = f"output lengths of {served.dataset.name}, {len(served.finished)} requests in order, from the 65th on"
    return Table(["predicted by", *measures], [[name, *one.values()] for name, one in lengths.items()], title=title)


def _page(
    made: results.Result, outputs: Mapping[str, Outputs], tables: Sequence[Table], notes: Sequence[str], verdict: str
) -> Page:  # fmt: skip
    chart = Chart(
        caption="Share of sequences whose greedy tokens are all the same as on exact KV, by their number",
        alt="A falling line for each format of KV",
        draw=lambda path: lines(
            list(_agreement(outputs)), path, xlabel="greedy tokens", ylabel="share of sequences", y_max=1.0
        ),
    )
    sections = [Section(title="Answers, by what the KV was kept in", charts=[chart], table=tables[0])]
    sections += [Section(title="Predicted output lengths", text=one.title, table=one) for one in tables[1:]]
    return Page(
        title=f"8-bit KV under {made.config['model']}",
        verdicts=[Verdict(text=verdict, kind="met" if made.claims[0].met else "missed")],
        sections=sections, left_out=notes, command=made.command, facts=facts_of(made),
    )  # fmt: skip


def _agreement(outputs: Mapping[str, Outputs]) -> Iterator[Series]:
    for name in (name for name in outputs if name != EXACT):
        same = (outputs[name].greedy == outputs[EXACT].greedy).long().cumprod(1).double().mean(0)
        yield Series(label=_LABELS[name], x=list(range(1, len(same) + 1)), y=same.tolist())


# --- flags ------------------------------------------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser(
        prog="vllm-ext quality",
        description="Say whether KV in 8 bits (--kv-tier-bits 8) changes a model's answers on your texts: perplexity "
        "and greedy tokens of the second half of each text, on KV of the first half that was kept in 8 bits. "
        "Exit status: 0 passes the limit, 1 does not, 2 usage, 3 failed.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, or a model of the Hugging Face hub")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="texts as the model sees them: a .txt, JSON lines "
                        "with 'text' or 'prompt', or what --trace takes with texts")  # fmt: skip
    _count(parser, "--sequences", 64, "sequences that are cut from the texts")
    _count(parser, "--tokens", 1024, "tokens of a sequence")
    _count(parser, "--greedy-tokens", 64, "tokens generated after the first half of each")
    _count(parser, "--block-size", BLOCK_TOKENS, "tokens of a KV block, as --block-size of the server")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="as you serve it (default: the checkpoint's)")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="(default: a GPU if torch sees one)")
    parser.add_argument("--request-log", type=Path, metavar="FILE", help="also say how well output lengths of these "
                        "requests are predicted: a request log, or what --trace takes")  # fmt: skip
    common_flags.add(parser, "seed", "out", "html", "json", quiet="no progress")
    return parser


def _count(parser: Parser, flag: str, default: int, what: str) -> None:
    parser.add_argument(
        flag, type=common_flags.at_least(1), default=default, metavar="N", help=f"{what} (default: {default})"
    )
