"""What a predictor's folder holds, and whether it is whole: read, checked and described; nothing is changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ext.prediction import decoder_file, store_files, store_generation, tuned_encoder
from vllm_ext.prediction.encoder_tuning import EncoderReport
from vllm_ext.prediction.folder import DECODER, STORE
from vllm_ext.prediction.store_rows import Entries

_QUANTILES = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True, kw_only=True)
class StoreFacts:
    """A store whose checksums are right."""

    format: str
    encoder: str
    dim: int
    entries: int
    different_prompts: int
    """Different vectors."""
    models: dict[str, int]
    """Name of a served model -> entries."""
    lengths: dict[str, float]
    """Quantiles and mean of the output lengths in tokens; empty without entries."""
    first_s: float | None
    """Earliest time of an entry in seconds since the epoch; None where no entry has one."""
    last_s: float | None
    without_time: int
    """Entries without a time: learned from a dataset."""
    keeps_prompts: bool
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class DecoderFacts:
    """A decoder whose checksum is right."""

    format: str
    spec: dict[str, Any]
    """Fields of `DecoderSpec`."""
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class FolderReport:
    """Everything there is to say."""

    store: StoreFacts | None
    """None where there is none, or a damaged one."""
    decoder: DecoderFacts | None
    size_bytes: int
    """Of the whole folder."""
    tuned: EncoderReport | None
    """None where the encoder was not tuned."""
    set_aside: tuple[str, ...]
    """Names of what was found damaged before."""
    problems: tuple[str, ...]
    """What is damaged or doesn't fit together, a line each."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


def describe(folder: Path) -> FolderReport:
    """Read a predictor's folder and check every file.

    Raises:
        FileNotFoundError: it holds neither a store nor a decoder.
        OSError: something can't be read.
    """
    problems: list[str] = []
    store, decoder, tuned = _store(folder / STORE, problems), _decoder(folder / DECODER, problems), None
    try:
        tuned = tuned_encoder.read(folder)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except ValueError as damage:
        problems.append(str(damage))
    if store is None and decoder is None and tuned is None and not problems:
        raise FileNotFoundError(f"{folder}: holds no predictor (neither {STORE} nor {DECODER})")
    if store is not None and decoder is not None:
        for field, wanted in (("encoder", store.encoder), ("dim", store.dim)):
            if decoder.spec[field] != wanted:
                problems.append(f"{folder / DECODER}: {field}={decoder.spec[field]!r}: must be the store's, {wanted!r}")
    aside = sorted(path.name for path in folder.iterdir() if ".damaged-" in path.name) if folder.is_dir() else []
    return FolderReport(
        store=store, decoder=decoder, tuned=tuned, size_bytes=_size(folder), set_aside=tuple(aside),
        problems=tuple(problems),
    )  # fmt: skip


def as_rows(report: FolderReport) -> list[tuple[str, str]]:
    """Return the report as pairs of a name and a text."""
    rows: list[tuple[str, str]] = []
    if (store := report.store) is None:
        rows.append(("store", "none that can be used"))
    else:
        rows += [
            ("store", f"{store.entries} entries of {store.different_prompts} prompts, {_mib(store.size_bytes)}"),
            ("format", store.format),
            ("encoder", f"{store.encoder}, dim {store.dim}"),
            ("models", ", ".join(f"{name or '(no name)'}: {count}" for name, count in store.models.items()) or "-"),
            ("output tokens", ", ".join(f"{name} {value:.4g}" for name, value in store.lengths.items()) or "-"),
            ("times", _times(store)),
            ("prompts", "kept" if store.keeps_prompts else "not kept, embeddings only"),
        ]
    if (decoder := report.decoder) is None:
        rows.append(("decoder", "none that can be used"))
    else:
        spec = decoder.spec
        rows += [
            ("decoder", f"trained on {spec['num_examples']} examples, {_mib(decoder.size_bytes)}"),
            ("decoder format", decoder.format),
            ("decoder encoder", f"{spec['encoder']}, dim {spec['dim']}"),
            ("hidden layers", ", ".join(map(str, spec["hidden"])) or "none"),
            ("features", ", ".join(spec["features"]) or "none"),
            ("estimates within", f"{spec['min_tokens']} to {spec['max_tokens']} tokens"),
            ("skill", f"{spec['skill']:.3f} (0 is a constant, 1 is perfect; held-out prompts)"),
            ("P90 coverage", f"{spec['p90_coverage']:.1%} of the held-out prompts, which also calibrate it"),
        ]
    if (tuned := report.tuned) is not None:
        rows += [
            ("tuned encoder", f"{tuned.layers} of {tuned.of_layers} layers of {tuned.base}"),
            ("tuned on", f"{tuned.num_train} prompts, skill {tuned.skill:.3f} on {tuned.num_validation} others"),
        ]
    rows.append(("size on disk", _mib(report.size_bytes)))
    if report.set_aside:
        rows.append(("set aside", ", ".join(report.set_aside)))
    rows.append(("checksums", "all right" if not report.problems else f"{len(report.problems)} problems, see below"))
    return rows


def _store(path: Path, problems: list[str]) -> StoreFacts | None:
    try:
        entries, metadata = store_files.read(path)
    except FileNotFoundError:
        return None
    except ValueError as damage:
        problems.append(str(damage))
        return None
    except (IsADirectoryError, NotADirectoryError) as error:
        problems.append(f"{error.filename}: damaged, a folder where a file must be, or a file where a folder must be")
        return None
    times = entries.times_s[entries.times_s != 0]
    return StoreFacts(
        format=store_generation.FORMAT,
        encoder=metadata["encoder"],
        dim=metadata["dim"],
        entries=len(entries),
        different_prompts=len({vector.tobytes() for vector in entries.vectors}),
        models=dict(sorted(Counter(entries.models).items(), key=lambda item: (-item[1], item[0]))),
        lengths=_lengths(entries),
        first_s=float(times.min()) if len(times) else None,
        last_s=float(times.max()) if len(times) else None,
        without_time=len(entries) - len(times),
        keeps_prompts=entries.prompts is not None,
        size_bytes=_size(path),
    )


def _decoder(path: Path, problems: list[str]) -> DecoderFacts | None:
    try:
        decoder = decoder_file.load(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError:
        problems.append(f"{path}: damaged, must be a file")
        return None
    except ValueError as damage:
        problems.append(str(damage))
        return None
    return DecoderFacts(format=decoder_file.FORMAT, spec=asdict(decoder.spec), size_bytes=path.stat().st_size)


def _lengths(entries: Entries) -> dict[str, float]:
    if not len(entries):
        return {}
    quantiles = np.quantile(entries.lengths, list(_QUANTILES.values()))
    return {**dict(zip(_QUANTILES, quantiles.tolist(), strict=True)), "mean": float(entries.lengths.mean())}


def _size(path: Path) -> int:
    """Bytes of all files below; what goes while we look, as a service saves, does not count."""
    total = 0
    for file in path.rglob("*") if path.is_dir() else [path]:
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def _times(store: StoreFacts) -> str:
    if store.first_s is None or store.last_s is None:
        return "none"
    text = f"{_moment(store.first_s)} to {_moment(store.last_s)}"
    return f"{text}; {store.without_time} entries without" if store.without_time else text


def _moment(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):  # a year that no calendar has
        return f"{seconds:g} s"


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"
