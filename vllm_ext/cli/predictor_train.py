"""`vllm-ext predictor train` and `merge`: a predictor's folder from a dataset, or from other folders."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_ext.cli.predictor_report import Clock, Trained, report
from vllm_ext.cli.spec_flags import UsageError, public
from vllm_ext.observability import results
from vllm_ext.observability.count_progress import CountProgress
from vllm_ext.prediction import refresh, seeding, store_files
from vllm_ext.prediction.folder import DECODER, STORE, default_folder
from vllm_ext.prediction.prompt_text import PromptText
from vllm_ext.prediction.store_generation import CURRENT
from vllm_ext.prediction.store_rows import Entries

if TYPE_CHECKING:
    from vllm_ext.prediction.decoder_descent import Epoch
    from vllm_ext.prediction.vector_store import VectorStore

_MIB = 2**20


class _Learned(NamedTuple):
    entries: Entries
    counted: dict[str, int]
    """What lengths are counted in -> how many."""
    different: int
    """Different texts."""


class _There(NamedTuple):
    """The store that a folder holds already."""

    state: bytes = b""
    """What tells it from a later one."""
    entries: Entries | None = None
    """None where there is no store."""
    encoder: str = ""

    @classmethod
    def read(cls, folder: Path) -> _There:
        state = _state(folder)  # before the entries: what is saved in between shows as a change later
        try:
            entries, metadata = store_files.read(folder / STORE)
        except FileNotFoundError:
            return cls(state)
        return cls(state, entries, metadata["encoder"])

    def check_encoder(self, folder: Path, encoder: str) -> None:
        if self.entries is not None and self.encoder != encoder:
            raise UsageError(
                f"{folder}: encoder={self.encoder!r}: must be {encoder!r} to add to it; use its --encoder, "
                "--prompt-tokens and --prompt-window, or --overwrite"
            )


def train(args: argparse.Namespace, command: str) -> int:
    """Learn from a dataset."""
    clock = Clock()
    folder: Path = args.out or default_folder(args.model)
    _check_place(folder, fresh=not (args.append or args.overwrite), flags="--append or --overwrite")
    found = seeding.read_rows(
        args.dataset,
        format=args.dataset_format,
        where=_where(args.dataset_where),
        max_rows=args.max_rows,
        seed=args.seed,
    )
    count = None if args.tokenizer is None else seeding.token_counter(args.tokenizer)
    there = _There.read(folder) if args.append else _There()
    encoder = _encoder(args)
    there.check_encoder(folder, encoder.name)
    learned = _learned(args, found, encoder, count, clock)
    store = _filled(there, learned.entries, encoder.name, args)
    trained = _trained(store, args)
    clock.note("train_s")
    if args.append and _state(folder) != there.state:  # a server saved meanwhile: what it learned must not be lost
        there = _There.read(folder)
        there.check_encoder(folder, encoder.name)
        store = _filled(there, learned.entries, encoder.name, args)
    with seeding.uninterrupted():
        entries = seeding.commit(
            folder, store, trained.decoder, keep_decoder=args.append, max_bytes=args.max_mib * _MIB
        )  # fmt: skip
        metrics = {
            "rows": len(found.rows),
            "rows_without_prompt_text": found.without_text,
            "rows_skipped": found.dataset.skipped,
            "duplicate_prompts": len(found.rows) - learned.different,
            "entries_before": len(there.entries or ()),
            "entries": entries,
            "embed_prompts_per_s": learned.different / clock.seconds["embed_s"],
        }
        config = {
            "model": public(args.model),
            "encoder": encoder.name,
            "lengths_counted_in": learned.counted,
            "dataset_format": found.dataset.format,
            "dataset_where": args.dataset_where,
            "max_rows": args.max_rows,
        }
        workload = results.Workload(
            name=found.dataset.name, rows=len(found.dataset.rows), sha256=found.dataset.sha256
        )  # fmt: skip
        forgotten = there.entries is not None and there.entries.prompts is not None and not args.keep_prompts
        report("predictor_train", args, command, folder, workload, config, metrics, trained, clock)
        if forgotten and not args.quiet:
            print("texts of prompts that were kept there are forgotten: there was no --keep-prompts", file=sys.stderr)
    return 0


def merge(args: argparse.Namespace, command: str) -> int:
    """Make one predictor of several."""
    clock = Clock()
    _check_place(args.out, fresh=not args.overwrite, flags="--overwrite")
    found = [_There.read(folder) for folder in args.folders]
    for folder, there in zip(args.folders, found, strict=True):
        if there.entries is None:
            raise UsageError(f"{folder}: holds no store")
    # It is only written, and never beyond its capacity: it needs no index.
    store = store_files.merge(
        [folder / STORE for folder in args.folders], capacity=args.capacity, index="flat", seed=args.seed,
        keep_prompts=args.keep_prompts,
    )  # fmt: skip
    clock.note("merge_s")
    trained = _trained(store, args)
    clock.note("train_s")
    with seeding.uninterrupted():
        entries = seeding.commit(
            args.out, store, trained.decoder, keep_decoder=False, max_bytes=args.max_mib * _MIB
        )  # fmt: skip
        before = sum(len(there.entries or ()) for there in found)
        workload = results.Workload(
            name="+".join(folder.name for folder in args.folders),
            rows=before,
            sha256=hashlib.sha256(b"".join(there.state for there in found)).hexdigest(),
        )
        metrics = {"stores": len(found), "entries_before": before, "entries": entries}
        config = {"encoder": store.encoder}
        report("predictor_merge", args, command, args.out, workload, config, metrics, trained, clock)
    return 0


# --- parts ------------------------------------------------------------------------------------------------------------


def _check_place(folder: Path, *, fresh: bool, flags: str) -> None:
    """Refuse, before minutes of work, a folder that may not be written or holds a predictor."""
    if fresh and any(os.path.lexists(folder / name) for name in (STORE, DECODER)):
        raise UsageError(f"{folder}: holds a predictor already; say {flags}, or another --out")
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{folder}: can't be made or written, because of {there}")


def _where(texts: Sequence[str]) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for text in texts:
        field, equals, values = text.partition("=")
        if not field or not equals or field in found:
            raise UsageError(f"--dataset-where {text}: must be FIELD=A,B, every field once")
        found[field] = frozenset(values.split(","))
    return found


def _state(folder: Path) -> bytes:
    """What tells one state of the store from another; empty while there is none."""
    try:
        return (folder / STORE / CURRENT).read_bytes()
    except FileNotFoundError:
        return b""


def _learned(
    args: argparse.Namespace, found: seeding.Rows, encoder: Any, count: seeding.TokenCounter | None, clock: Clock
) -> _Learned:
    if count is None:
        name = seeding.OF_ENCODER
    else:
        path = args.tokenizer.resolve()
        name = f"tokens of {path.parent.name if path.is_file() else path.name}"
    lengths, counted = seeding.lengths_of(found.rows, count or encoder.count_tokens, name)
    prompt_text = PromptText(max_tokens=args.prompt_tokens, system_chars=args.system_chars)
    texts = seeding.texts_of(found.rows, prompt_text)
    clock.note("read_s")
    with CountProgress(len(texts), label="embedding", unit="prompt", quiet=args.quiet) as progress:
        vectors = seeding.embed(encoder, texts, progress.update)
    clock.note("embed_s")
    models = [args.model] * len(texts)
    entries = Entries.checked(
        encoder.dim,
        vectors,
        lengths,
        models,
        prompts=texts if args.keep_prompts else None,
        prompt_tokens=seeding.prompt_tokens_of(found.rows, count or encoder.count_tokens),
    )
    return _Learned(entries, counted, len(set(texts)))


def _encoder(args: argparse.Namespace) -> Any:
    from vllm_ext.prediction.encoder import Encoder

    return Encoder(args.encoder, threads=args.threads, max_tokens=args.prompt_tokens, window=args.prompt_window)


def _filled(there: _There, added: Entries, encoder: str, args: argparse.Namespace) -> VectorStore:
    return seeding.filled(
        there.entries,
        added,
        encoder=encoder,
        capacity=args.capacity,
        keep_prompts=args.keep_prompts,
        seed=args.seed,
    )


def _trained(store: VectorStore, args: argparse.Namespace) -> Trained:
    with CountProgress(args.epochs, label="training", unit="epoch", quiet=args.quiet) as progress:

        def tell(epoch: Epoch) -> None:
            progress.update(epoch.number, f"held-out loss {epoch.validation_loss:.4f}")

        try:
            decoder, training = refresh.train_from(
                store.entries(), store.encoder, seed=args.seed, hidden=args.hidden, epochs=args.epochs,
                patience=args.patience, threads=args.threads, on_epoch=tell,
            )  # fmt: skip
        except refresh.NoDecoderError as reason:
            return Trained(None, None, str(reason))
    return Trained(decoder, training, "")
