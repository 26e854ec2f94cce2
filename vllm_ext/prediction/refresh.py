"""Train the decoder of a predictor's folder from its store; the running service starts this from time to time.

    python -m vllm_ext.prediction.refresh FOLDER --seed 7 --max-examples 20000

A process of its own, of the lowest priority and with one thread: training takes a core for up to a minute, and neither
the engine nor the process that predicts may wait for it. Its exit status says what came of it:

| status | the decoder's file |
|---|---|
| 0 | is a new one, better than a constant on held-out prompts |
| 3 | is as it was: there is too little in the store, or what was trained is no better than a constant |
| 2 | is as it was: the store is damaged, or a file can't be read or written, or an option is wrong |

With 2 and 3 the reason is one line on stderr. The store is only read.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_ext.prediction.decoder import Decoder
    from vllm_ext.prediction.decoder_descent import Epoch
    from vllm_ext.prediction.decoder_train import TrainingReport
    from vllm_ext.prediction.store_rows import Entries

MAX_EXAMPLES = 20_000
"""Entries a refresh learns from: the newest. Time and memory of training grow with them."""
WRITTEN, WRONG, NOT_BETTER = 0, 2, 3
"""Exit statuses."""
HIDDEN = (512, 256)
EPOCHS, PATIENCE = 60, 6
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class NoDecoderError(ValueError):
    """There is no decoder worth keeping; the message says why."""


def train_from(
    entries: Entries,
    encoder: str,
    *,
    seed: int,
    hidden: tuple[int, ...] = HIDDEN,
    epochs: int = EPOCHS,
    patience: int = PATIENCE,
    threads: int = 1,
    max_examples: int | None = None,
    judged: frozenset[bytes] = frozenset(),
    on_epoch: Callable[[Epoch], None] | None = None,
) -> tuple[Decoder, TrainingReport]:
    """Train a decoder from what a store holds.

    Args:
        entries: Of the store; never changed.
        encoder: Name of the encoder of their embeddings.
        max_examples: Use the entries inserted last, at most so many; None for all.
        judged: Embeddings of the examples that judge, as of `selection.train_best`; none for a random choice.

    The others as of `decoder_train.train`.

    Raises:
        NoDecoderError: fewer than 20 different prompts, or the decoder is no better than a constant.
        ValueError: an option is out of its range.
    """
    import numpy as np

    from vllm_ext.prediction import decoder_train
    from vllm_ext.prediction.selection import train_best

    if max_examples is not None:
        if max_examples < decoder_train.MIN_EXAMPLES:
            raise ValueError(f"max_examples={max_examples!r}: must be at least {decoder_train.MIN_EXAMPLES}")
        entries = entries.take(slice(max(0, len(entries) - max_examples), None))
    if (prompts := _different(entries, decoder_train.MIN_EXAMPLES)) < decoder_train.MIN_EXAMPLES:
        raise NoDecoderError(
            f"{len(entries)} entries of {prompts} different prompts: a decoder needs {decoder_train.MIN_EXAMPLES}"
        )
    judges = np.array([vector.tobytes() in judged for vector in entries.vectors])
    decoder, report = train_best(
        entries.vectors, entries.lengths, entries.prompt_tokens, hidden=hidden, encoder=encoder, seed=seed,
        epochs=epochs, patience=patience, threads=threads, judged=judges if judges.any() else None, on_epoch=on_epoch,
    )  # fmt: skip
    if not report.skill > 0:
        raise NoDecoderError(
            f"trained on {len(entries)} entries it is no better than a constant on held-out prompts "
            f"(skill {report.skill:.3f})"
        )
    return decoder, report


def _different(entries: Entries, enough: int) -> int:
    """Count different prompts, but not beyond what is enough."""
    seen = set[bytes]()
    for vector in entries.vectors:
        seen.add(vector.tobytes())
        if len(seen) == enough:
            break
    return len(seen)


def widths(text: str) -> tuple[int, ...]:
    """Read the widths of hidden layers: ``512,256``.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers of at least 1 separated by commas")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Train and write; return the exit status."""
    args = _parser().parse_args(argv)
    os.nice(19)
    for name in _ONE_THREAD:  # before numpy is imported, which reads them once
        os.environ[name] = "1"
    from vllm_ext.observability.files import remove_leftovers
    from vllm_ext.prediction import decoder_file, store_files
    from vllm_ext.prediction.folder import DECODER, STORE

    try:
        entries, metadata = store_files.read(args.folder / STORE)
        decoder, _ = train_from(
            entries, metadata["encoder"], seed=args.seed, hidden=args.hidden, epochs=args.epochs,
            patience=args.patience, max_examples=args.max_examples,
        )  # fmt: skip
        decoder_file.save(decoder, args.folder / DECODER)
        remove_leftovers(args.folder, DECODER)
    except FileNotFoundError:
        return _tell(NOT_BETTER, f"{args.folder / STORE}: no store yet")
    except NoDecoderError as reason:
        return _tell(NOT_BETTER, f"{args.folder}: {reason}")
    except (ValueError, OSError) as error:
        return _tell(WRONG, str(error))
    return WRITTEN


def _tell(status: int, message: str) -> int:
    print(f"decoder not refreshed: {' '.join(message.split())}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_ext.prediction.refresh",
        description="Train the decoder of a predictor's folder from its store. Exit status 0: written; 3: too little "
        "to learn from, or no better than a constant; 2: the store is damaged.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the predictor")
    parser.add_argument("--seed", type=int, default=0, help="of weights, split and order (default: 0)")
    parser.add_argument(
        "--max-examples", type=int, default=MAX_EXAMPLES, metavar="N", help=f"newest entries used ({MAX_EXAMPLES})"
    )
    parser.add_argument("--hidden", type=widths, default=HIDDEN, metavar="A,B", help="widths of the hidden layers")
    parser.add_argument("--epochs", type=int, default=EPOCHS, metavar="N", help=f"at most ({EPOCHS})")
    parser.add_argument(
        "--patience", type=int, default=PATIENCE, metavar="N", help=f"epochs without a better loss ({PATIENCE})"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
