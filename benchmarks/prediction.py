"""How good are length predictors, what do they cost, and what is their quality worth to the scheduler?

Question: how do retrieval, the decoder and their combinations (`alise` as published, `shrunk` ours) compare with a
small transformer fine-tuned for lengths (S3, SSJF), and with what is known without reading the prompt (prompt length,
history, the client's bound); on prompts like those learned from, and on others?

Method, pairs: prompts with recorded answers; lengths in tokens of the encoder's tokenizer. Of every data set 30 % are
tested on, drawn by the seed; every predictor learns from the other 70 % of each data set and predicts the tested part
of each. Repeated prompts are left out within a file, and between what is learned and tested, and counted. Sets below
400 distinct prompts are only tested on. Alpaca, ShareGPT and Dolly were used to choose defaults; the others were not.
Method, curve: tested and other prompts of a set arrive one by one; each is predicted, then learned from, and the
decoder is trained as the service does. It starts cold, or with what was learned from another set.
Method, latency: wall time per prompt, text in, quantiles out, all on one thread, the calls taking turns.
Method, worth: requests carry their predicted lengths as hints to the real scheduler on a simulated server, at the load
where first come first served has 200 ms per token; mean normalised latency against that and against true lengths.

Output: the measures of `vllm_ext.prediction.evaluation.measures` by pair, their means, and the goals of the issue. A
part is measured again with ``--only``, and replaces that part of the result given by ``--update``. ``--cache`` keeps
embeddings and what fine-tuned proxies said, which take most of the time (an hour on one core). Without ``--data`` the
prompts are made up.

    OMP_NUM_THREADS=1 python benchmarks/prediction.py --quick
    OMP_NUM_THREADS=1 python benchmarks/prediction.py --data ../shared/data --cache CACHE \\
        --out benchmarks/results/prediction.json
    OMP_NUM_THREADS=1 python benchmarks/prediction.py --data ../shared/data --only latency \\
        --update benchmarks/results/prediction.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import prediction_curve as curve
import prediction_latency as latency
import prediction_pairs as pairs
import prediction_results as results
import prediction_worth as worth
from prediction_data import MADE_UP, PAIRS, QUICK, SOURCES, Cache, Part, load

from vllm_ext.datasets import DatasetError
from vllm_ext.observability.provenance import result_path
from vllm_ext.observability.results import add_arguments, command, emit
from vllm_ext.prediction.encoder import Encoder
from vllm_ext.prediction.evaluation.compare import Setting
from vllm_ext.prediction.evaluation.rows import EvaluationError
from vllm_ext.prediction.tuning_options import TuningOptions

CHOSEN = "shrunk"
"""The strategy that goals are judged on."""
MAX_ROWS = 1500
QUICK_ROWS = 80
PROMPT_TOKENS = 128
"""The service's (`PredictorConfig.prompt_tokens`)."""


def main(argv: Sequence[str]) -> int:
    """Measure, print, write; 2 if a file is missing or wrong."""
    args = _parser().parse_args(argv)
    try:
        return _measure(args, argv)
    except (DatasetError, EvaluationError, results.UpdateError) as error:
        print(f"prediction.py: {error}", file=sys.stderr)
        return 2


def _measure(args: argparse.Namespace, argv: Sequence[str]) -> int:
    asked = command(argv, "benchmarks/prediction.py")
    measured = results.Measured.read(args.update) if args.update is not None else results.Measured()
    encoder = Encoder(threads=1, max_tokens=PROMPT_TOKENS)
    setting = Setting(encoder=encoder, seed=args.seed)
    cache = Cache(args.cache)
    wanted = args.only or results.PARTS
    names = _names(args)
    parts: dict[str, Part] = {}
    if set(wanted) - {"latency"}:
        rows = args.max_rows or (QUICK_ROWS if args.quick else MAX_ROWS)
        parts = {name: load(name, args.data, encoder, cache, max_rows=rows, seed=args.seed) for name in names}
    tuned = frozenset(name for name, part in parts.items() if part.tuned)
    options = TuningOptions(epochs=1) if args.quick else TuningOptions()
    shown: list[str] = []
    if "pairs" in wanted:
        trained = names if args.trained is None else tuple(args.trained.split(","))
        found = pairs.measure(parts, setting, cache, trained=trained, options=options, proxies=not args.no_proxies)
        measured.replace("pairs", pairs.metrics(found, tuned), asked, pairs.facts(found, parts))
        shown += pairs.report(found, tuned, CHOSEN)
    if "curve" in wanted:
        streams = curve.streams(parts, args.data, encoder, cache, quick=args.quick, seed=args.seed)
        curves = curve.measure(streams, args.seed)
        measured.replace("curve", curve.metrics(curves), asked, curve.facts(streams))
        shown.append(curve.table(curves))
    if "latency" in wanted:
        lengths = (16, 64) if args.quick else (16, 64, PROMPT_TOKENS)
        entries, repeats = (1000, 2) if args.quick else (10_000, 20)
        timed = latency.measure(encoder, CHOSEN, lengths, (1, 16), entries=entries, repeats=repeats, seed=args.seed)
        measured.replace("latency", latency.metrics(timed), asked, {"entries": entries, "repeats": repeats})
        shown.append(latency.table(timed))
    if "worth" in wanted:
        requests, draws = (60, 1) if args.quick else (800, 3)
        fine_tuned = () if args.no_proxies else worth.FINE_TUNED
        worths = worth.measure(
            parts, setting, cache, options, requests=requests, draws=draws, fine_tuned=fine_tuned
        )  # fmt: skip
        facts = {"requests": requests, "draws": draws, **worth.FACTS}
        measured.replace("worth", worth.metrics(worths), asked, facts)
        shown.append(worth.table(worths))
    general = {"encoder": encoder.name, "chosen": CHOSEN, "quick": args.quick}
    result = results.result(measured, asked, general, [part.data for part in parts.values()], args.seed)
    emit(result, shown, args.out or args.update)
    return 0


def _names(args: argparse.Namespace) -> tuple[str, ...]:
    if args.data is None:
        return MADE_UP
    if args.datasets is not None:
        return tuple(args.datasets.split(","))
    return QUICK if args.quick else PAIRS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of the shared data (default: made-up prompts)")
    parser.add_argument("--datasets", metavar="A,B", help=f"of {', '.join(SOURCES)} (default: {','.join(PAIRS)})")
    parser.add_argument("--max-rows", type=int, metavar="N", help=f"of each data set (default: {MAX_ROWS})")
    parser.add_argument("--trained", metavar="A,B", help="of these, learned from (default: all); all are tested on")
    parser.add_argument("--no-proxies", action="store_true", help="leave out the fine-tuned models, which take minutes")
    parser.add_argument("--only", action="append", choices=results.PARTS, help="a part; repeatable")
    parser.add_argument("--update", type=result_path, metavar="FILE", help="result whose parts measured are replaced")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keep here what takes long, or take it from here")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
