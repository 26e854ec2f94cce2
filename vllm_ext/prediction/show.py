"""What a predictor's folder holds: described, and exported for other tools. Nothing is changed."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ext.files import replaced
from vllm_ext.prediction import store_file
from vllm_ext.prediction.folder import REGRESSION, STORE
from vllm_ext.prediction.regression import Ridge

SUFFIXES = (".jsonl", ".csv")
_QUANTILES = (0.1, 0.5, 0.9, 0.99)
_EXPORTED = "model, tag, turn, prompt_tokens, tokens, aborted, time_s, encoder, prompt"


def describe(folder: Path) -> dict[str, Any]:
    """Return what a predictor holds, as plain data; ``problems`` names what is damaged.

    Raises:
        FileNotFoundError: it holds no predictor.
        OSError: something can't be read.
    """
    files = sorted(path for name in (STORE, REGRESSION) for path in folder.glob(f"{name}*"))
    if not files:
        raise FileNotFoundError(f"{folder}: holds no predictor (neither {STORE} nor {REGRESSION})")
    problems: list[str] = []
    return {
        "store": _store(folder / STORE, problems),
        "regression": _regression(folder / REGRESSION, problems),
        "size_bytes": sum(path.stat().st_size for path in files),
        "set_aside": [path.name for path in files if ".damaged-" in path.name],
        "problems": problems,
    }


def as_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a description as pairs of a name and a text."""
    rows = []
    for part in ("store", "regression"):
        rows += [(part, "none that can be used")] if found[part] is None else []
        rows += [(f"{part} {name}", _shown(value)) for name, value in (found[part] or {}).items()]
    rows.append(("size on disk", f"{found['size_bytes'] / 2**20:.2f} MiB"))
    if found["set_aside"]:
        rows.append(("set aside", ", ".join(found["set_aside"])))
    return rows


def export(folder: Path, out: Path) -> int:
    """Write what is known of each finished request, without embeddings; returns how many.

    Raises:
        ValueError: the name ends in none of `SUFFIXES`, or the store is damaged.
        FileNotFoundError: there is no store.
        OSError: it can't be written.
    """
    if out.suffix not in SUFFIXES:
        raise ValueError(f"out={out.name!r}: must end in {' or '.join(SUFFIXES)}")
    names = _EXPORTED.split(", ")
    count = 0
    try:
        with closing(store_file.read_only(folder / STORE)) as db, replaced(out) as file:
            rows: Iterator[tuple[Any, ...]] = db.execute(f"SELECT {_EXPORTED} FROM entries ORDER BY id")
            text = io.TextIOWrapper(file, encoding="utf-8", newline="")
            table = csv.writer(text)
            if out.suffix == ".csv":
                table.writerow(names)
            for count, row in enumerate(rows, 1):  # noqa: B007 - counts
                if out.suffix == ".csv":
                    table.writerow(row)
                else:
                    text.write(json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) + "\n")
            text.flush()
            text.detach()
    except (sqlite3.Error, store_file.DamagedError) as damage:
        raise ValueError(f"{folder / STORE}: {damage}") from damage
    return count


def _store(path: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        with closing(store_file.read_only(path)) as db:
            rows = db.execute("SELECT model, encoder, count(*) FROM entries GROUP BY model, encoder").fetchall()
            texts, prompts, aborted, first, last = db.execute(
                "SELECT count(DISTINCT text_hash), count(prompt), coalesce(sum(aborted), 0), "
                "min(nullif(time_s, 0)), max(nullif(time_s, 0)) FROM entries"
            ).fetchone()
            tokens = [row[0] for row in db.execute("SELECT tokens FROM entries WHERE NOT aborted")]
    except FileNotFoundError:
        return None
    except (sqlite3.Error, store_file.DamagedError) as damage:
        problems.append(f"{path}: {damage}")
        return None
    return {
        "entries": sum(row[2] for row in rows),
        "different_prompts": texts,
        "aborted": aborted,
        "models": _counts((row[0] or "(no name)", row[2]) for row in rows),
        "encoders": _counts((row[1], row[2]) for row in rows),
        "output_tokens": dict(
            zip((f"p{q * 100:g}" for q in _QUANTILES), np.quantile(tokens, _QUANTILES).tolist(), strict=True)
        )
        if tokens
        else {},
        "first": _moment(first),
        "last": _moment(last),
        "prompts_kept": prompts,
    }


def _regression(path: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        ridge = Ridge.load(path)
    except FileNotFoundError:
        return None
    except ValueError as damage:
        problems.append(str(damage))
        return None
    low, high = (
        float(np.exp(np.interp(q, np.linspace(0, 1, len(ridge.residuals)), ridge.residuals))) for q in (0.1, 0.9)
    )
    return {
        "examples": ridge.examples,
        "encoder": ridge.encoder,
        "strength": ridge.strength,
        "kernel_width": ridge.width,
        "true_over_predicted": {"p10": low, "p90": high},
    }


def _counts(pairs: Iterator[tuple[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for name, count in pairs:
        total[name] = total.get(name, 0) + count
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))


def _moment(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):  # a year that no calendar has
        return f"{seconds:g} s"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items()) or "-"
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)
