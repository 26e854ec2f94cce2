r"""Entries of a store as a file for other tools: JSON lines, CSV or numpy arrays; never anything pickled.

| suffix | holds |
|---|---|
| ``.jsonl`` | an object per entry: output_tokens, time_s, model, prompt_tokens; prompt if kept, vector if asked |
| ``.csv`` | the same as columns, v0 ... v383 for a vector; UTF-8, lone surrogates as ``\udXXX`` |
| ``.npz`` | arrays vectors [n, dim], output_tokens, times_s, prompt_tokens (0 if unknown), model_codes [n], models |

JSON lines with prompts are a dataset that `vllm-ext predictor train` and `vllm-ext simulate` read.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vllm_ext.observability.files import replaced
from vllm_ext.prediction.store_rows import Entries


def export(entries: Entries, path: Path, *, vectors: bool = False) -> None:
    """Write all entries, oldest insertion first; the file appears when it is complete.

    Args:
        entries: Of a store.
        path: Ends in one of `SUFFIXES`, which decides the format.
        vectors: Write the embeddings too; ``.npz`` always has them.

    Raises:
        ValueError: another suffix.
        OSError: it can't be written; a file that was there is as it was.
    """
    check_suffix(path)
    with replaced(path) as file:
        _WRITERS[path.suffix](entries, file, vectors)


def check_suffix(path: Path) -> None:
    """Raise ValueError unless the file's name says its format."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path.name}: must end in {', '.join(SUFFIXES)}")


def _rows(entries: Entries) -> Iterator[dict[str, Any]]:
    for row, (length, time_s) in enumerate(zip(entries.lengths.tolist(), entries.times_s.tolist(), strict=True)):
        found = {"output_tokens": length, "time_s": time_s or None, "model": entries.models[row]}
        found["prompt_tokens"] = int(entries.prompt_tokens[row]) or None
        yield found if entries.prompts is None else {**found, "prompt": entries.prompts[row]}


def _jsonl(entries: Entries, file: BinaryIO, vectors: bool) -> None:
    for row, found in enumerate(_rows(entries)):
        if found["prompt_tokens"] is None:  # a dataset's reader takes it for a statement
            del found["prompt_tokens"]
        whole = {**found, "vector": entries.vectors[row].tolist()} if vectors else found
        file.write(json.dumps(whole).encode() + b"\n")


def _csv(entries: Entries, file: BinaryIO, vectors: bool) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
    writer = csv.writer(text, lineterminator="\n")
    names = ["output_tokens", "time_s", "model", "prompt_tokens", *([] if entries.prompts is None else ["prompt"])]
    writer.writerow([*names, *(f"v{i}" for i in range(entries.vectors.shape[1]) if vectors)])
    for row, found in enumerate(_rows(entries)):
        values = ["" if value is None else value for value in found.values()]
        writer.writerow([*values, *(entries.vectors[row].tolist() if vectors else [])])
    text.detach()  # flushes, and leaves the file to its owner


def _npz(entries: Entries, file: BinaryIO, vectors: bool) -> None:  # noqa: ARG001 - always with vectors
    names = sorted(set(entries.models))
    codes = {name: code for code, name in enumerate(names)}
    np.savez(
        file,
        vectors=entries.vectors,
        output_tokens=entries.lengths,
        times_s=entries.times_s,
        model_codes=np.array([codes[name] for name in entries.models], np.int32),
        models=np.array(names, np.str_),
        prompt_tokens=entries.prompt_tokens,
    )


_WRITERS: dict[str, Callable[[Entries, BinaryIO, bool], None]] = {".jsonl": _jsonl, ".csv": _csv, ".npz": _npz}
SUFFIXES = tuple(_WRITERS)
"""How the name of an exported file may end."""
