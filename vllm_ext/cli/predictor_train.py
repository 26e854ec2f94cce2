"""`vllm-ext predictor train` and `merge`: a predictor's folder from a dataset, or from other folders."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vllm_ext.cli.predictor_report import Clock, Trained, report
from vllm_ext.cli.spec_flags import UsageError, public
from vllm_ext.observability import results
from vllm_ext.observability.count_progress import CountProgress
from vllm_ext.prediction import refresh, seeding, store_files, tuned_encoder
from vllm_ext.prediction.folder import DECODER, STORE, default_folder
from vllm_ext.prediction.prompt_text import PromptText
from vllm_ext.prediction.store_generation import CURRENT
from vllm_ext.prediction.store_rows import Entries
from vllm_ext.prediction.tuning_options import TuningOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vllm_ext.prediction.decoder_descent import Epoch
    from vllm_ext.prediction.encoder import Encoder
    from vllm_ext.prediction.encoder_tuning import EncoderReport
    from vllm_ext.prediction.vector_store import VectorStore

_MIB = 2**20


class _Read(NamedTuple):
    texts: list[str]
    """What is embedded of each row."""
    lengths: seeding.Lengths
    prompt_tokens: seeding.Lengths
    counted: dict[str, int]
    """What lengths are counted in -> how many."""


class _Tuned(NamedTuple):
    """The encoder that is used."""

    encoder: Encoder
    fresh: Path | None = None
    """Written, not yet in its place; None where it was not tuned now."""
    report: EncoderReport | None = None
    held: NDArray[np.bool_] | None = None
    """[n] rows it was not tuned on."""
    why_not: str = ""
    """Why it was not, although asked to."""


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
    _check_tuning(args)
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
    encoder = _encoder(args, _tuned_there(folder) if args.append and args.encoder is None else None)
    there.check_encoder(folder, encoder.name)
    read = _read(args, found, encoder, count)
    clock.note("read_s")
    tuned = _tuned(args, encoder, read, folder, clock)
    try:
        return _taught(args, command, folder, found, there, read, tuned, clock)
    finally:
        tuned_encoder.discard(tuned.fresh)


def _taught(
    args: argparse.Namespace, command: str, folder: Path, found: seeding.Rows, there: _There, read: _Read,
    tuned: _Tuned, clock: Clock,
) -> int:  # fmt: skip
    """Embed, train and write."""
    encoder = tuned.encoder
    entries = _embedded(args, encoder, read)
    clock.note("embed_s")
    store = _filled(there, entries, encoder.name, args)
    judged = frozenset[bytes]()
    if tuned.held is not None:
        judged = frozenset(vector.tobytes() for vector in entries.vectors[tuned.held])
    trained = _trained(store, args, judged)
    clock.note("train_s")
    if args.append and _state(folder) != there.state:  # a server saved meanwhile: what it learned must not be lost
        there = _There.read(folder)
        there.check_encoder(folder, encoder.name)
        store = _filled(there, entries, encoder.name, args)
    with seeding.uninterrupted():
        if not args.append:
            tuned_encoder.install(tuned.fresh, folder)
        written = seeding.commit(
            folder, store, trained.decoder, keep_decoder=args.append, max_bytes=args.max_mib * _MIB
        )  # fmt: skip
        different = len(set(read.texts))
        metrics = {
            "rows": len(found.rows),
            "rows_without_prompt_text": found.without_text,
            "rows_skipped": found.dataset.skipped,
            "duplicate_prompts": len(found.rows) - different,
            "entries_before": len(there.entries or ()),
            "entries": written,
            "embed_prompts_per_s": different / clock.seconds["embed_s"],
        }
        if tuned.report is not None:
            metrics |= {"encoder_layers": tuned.report.layers, "encoder_skill": tuned.report.skill}
        config = {
            "model": public(args.model),
            "encoder": encoder.name,
            "tuned_encoder": asdict(tuned.report) if tuned.report is not None else tuned.why_not or None,
            "lengths_counted_in": read.counted,
            "dataset_format": found.dataset.format,
            "dataset_where": args.dataset_where,
            "max_rows": args.max_rows,
        }
        workload = results.Workload(
            name=found.dataset.name, rows=len(found.dataset.rows), sha256=found.dataset.sha256
        )  # fmt: skip
        forgotten = there.entries is not None and there.entries.prompts is not None and not args.keep_prompts
        report("predictor_train", args, command, folder, workload, config, metrics, trained, clock)
        if not args.quiet:
            if tuned.why_not:
                print(f"the encoder was not tuned: {tuned.why_not}", file=sys.stderr)
            if forgotten:
                print(
                    "texts of prompts that were kept there are forgotten: there was no --keep-prompts", file=sys.stderr
                )
    return 0


def merge(args: argparse.Namespace, command: str) -> int:
    """Make one predictor of several."""
    clock = Clock()
    _check_place(args.out, fresh=not args.overwrite, flags="--overwrite")
    found = [_There.read(folder) for folder in args.folders]
    for folder, there in zip(args.folders, found, strict=True):
        if there.entries is None:
            raise UsageError(f"{folder}: holds no store")
    tuned = next((folder for folder in args.folders if _tuned_there(folder) is not None), None)
    # It is only written, and never beyond its capacity: it needs no index.
    store = store_files.merge(
        [folder / STORE for folder in args.folders], capacity=args.capacity, index="flat", seed=args.seed,
        keep_prompts=args.keep_prompts,
    )  # fmt: skip
    clock.note("merge_s")
    trained = _trained(store, args)
    clock.note("train_s")
    fresh = None if tuned is None else tuned_encoder.copy(tuned, args.out)
    with seeding.uninterrupted():
        tuned_encoder.install(fresh, args.out)
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
    if fresh and any(os.path.lexists(folder / name) for name in (STORE, DECODER, tuned_encoder.ENCODER)):
        raise UsageError(f"{folder}: holds a predictor already; say {flags}, or another --out")
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{folder}: can't be made or written, because of {there}")


def _check_tuning(args: argparse.Namespace) -> None:
    if args.tune_encoder and args.append:
        raise UsageError("--tune-encoder and --append: what is there was embedded by another encoder; say --overwrite")
    if args.tune_layers is not None and not args.tune_encoder:
        raise UsageError(f"--tune-layers {args.tune_layers}: needs --tune-encoder")


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


def _read(args: argparse.Namespace, found: seeding.Rows, encoder: Encoder, count: seeding.TokenCounter | None) -> _Read:
    if count is None:
        name = seeding.OF_ENCODER
    else:
        path = args.tokenizer.resolve()
        name = f"tokens of {path.parent.name if path.is_file() else path.name}"
    lengths, counted = seeding.lengths_of(found.rows, count or encoder.count_tokens, name)
    prompt_text = PromptText(max_tokens=args.prompt_tokens, system_chars=args.system_chars)
    return _Read(
        seeding.texts_of(found.rows, prompt_text),
        lengths,
        seeding.prompt_tokens_of(found.rows, count or encoder.count_tokens),
        counted,
    )


def _tuned(args: argparse.Namespace, encoder: Encoder, read: _Read, folder: Path, clock: Clock) -> _Tuned:
    """Tune the encoder if asked to, and load what was written of it."""
    if not args.tune_encoder:
        return _Tuned(encoder)
    from vllm_ext.prediction import encoder_tuning

    options = TuningOptions(epochs=args.tune_epochs)
    with CountProgress(options.updates(len(read.texts)), label="tuning", unit="update", quiet=args.quiet) as progress:
        try:
            tuned = encoder_tuning.tune(
                encoder, read.texts, read.lengths, model=args.encoder, layers=args.tune_layers, seed=args.seed,
                options=options, on_update=lambda done, _, loss: progress.update(done, f"held-out loss {loss:.4f}"),
            )  # fmt: skip
        except encoder_tuning.NothingLearnedError as reason:
            return _Tuned(encoder, why_not=str(reason))
    fresh = tuned_encoder.write(tuned, folder)
    try:
        found = _Tuned(_encoder(args, str(fresh)), fresh, tuned.report, tuned.held)
    except BaseException:
        tuned_encoder.discard(fresh)
        raise
    clock.note("tune_s")
    return found


def _embedded(args: argparse.Namespace, encoder: Encoder, read: _Read) -> Entries:
    with CountProgress(len(read.texts), label="embedding", unit="prompt", quiet=args.quiet) as progress:
        vectors = seeding.embed(encoder, read.texts, progress.update)
    return Entries.checked(
        encoder.dim,
        vectors,
        read.lengths,
        [args.model] * len(read.texts),
        prompts=read.texts if args.keep_prompts else None,
        prompt_tokens=read.prompt_tokens,
    )


def _encoder(args: argparse.Namespace, instead: str | None = None) -> Encoder:
    """Load the encoder of a path, if one is given, or what the flags say."""
    from vllm_ext.prediction.encoder import Encoder

    return Encoder(
        instead or args.encoder, threads=args.threads, max_tokens=args.prompt_tokens, window=args.prompt_window
    )  # fmt: skip


def _tuned_there(folder: Path) -> str | None:
    """Return the tuned encoder of a folder, None where there is none; unlike a server, complain of a damaged one."""
    try:
        tuned_encoder.read(folder)
    except FileNotFoundError:
        return None
    return str(folder / tuned_encoder.ENCODER)


def _filled(there: _There, added: Entries, encoder: str, args: argparse.Namespace) -> VectorStore:
    return seeding.filled(
        there.entries,
        added,
        encoder=encoder,
        capacity=args.capacity,
        keep_prompts=args.keep_prompts,
        seed=args.seed,
    )


def _trained(store: VectorStore, args: argparse.Namespace, judged: frozenset[bytes] = frozenset()) -> Trained:
    with CountProgress(args.epochs, label="training", unit="epoch", quiet=args.quiet) as progress:

        def tell(epoch: Epoch) -> None:
            progress.update(epoch.number, f"held-out loss {epoch.validation_loss:.4f}")

        try:
            decoder, training = refresh.train_from(
                store.entries(), store.encoder, seed=args.seed, hidden=args.hidden, epochs=args.epochs,
                patience=args.patience, threads=args.threads, judged=judged, on_epoch=tell,
            )  # fmt: skip
        except refresh.NoDecoderError as reason:
            return Trained(None, None, str(reason))
    return Trained(decoder, training, "")
