"""Which part of a prompt, and which text of a chat, ranks output lengths best? The two measurements and their tables.

A part of prediction_encoder.py: it is run from there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import prediction_ranking as ranking
from prediction_ranking import Ranking, Row

from vllm_ext.observability.results import Goal, format_table
from vllm_ext.prediction.encoder import DEFAULT_WINDOW, WINDOWS, Encoder, Window

CLOSE_ENOUGH = 0.02
"""By how much the default window may rank worse than the best one: about a standard error of tau."""
LEAST_ROWS = 30
"""Fewer rows say nothing about a window."""
_SPECIAL_TOKENS = 2
_CHARS = 100
"""Characters per token of a window that are counted to tell whether a prompt is longer: a document need not be read."""

Known = dict[str, npt.NDArray[np.float32]]


# --- windows ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WindowCell:
    """One ranking: over all rows, and over those longer than the window."""

    dataset: str
    max_tokens: int
    window: Window
    every: Ranking
    longer: Ranking | None
    """None where fewer than `LEAST_ROWS` rows are longer."""


def embed(encoder: Encoder, texts: Sequence[str], known: Known) -> npt.NDArray[np.float32]:
    """Embed texts whose windows are not known yet, and return the vectors of all; shape [len(texts), dim]."""
    windows = [encoder.window_of(text) for text in texts]
    fresh = sorted({window for window in windows if window not in known})
    known.update(zip(fresh, encoder.encode(fresh), strict=True))
    return np.stack([known[window] for window in windows])


def lengths_of(rows: Sequence[Row], encoder: Encoder) -> npt.NDArray[np.int64]:
    """Output lengths in tokens of the encoder's tokenizer, at least 1; shape [len(rows)]."""
    return np.array([max(1, encoder.count_tokens(row.output)) for row in rows], dtype=np.int64)


def measure_windows(datasets: Mapping[str, Sequence[Row]], sizes: Sequence[int], seed: int) -> list[WindowCell]:
    """Rank every data set by every window of every size."""
    cells = []
    for size in sizes:
        known: Known = {}
        encoders = {window: Encoder(max_tokens=size, window=window) for window in WINDOWS}
        for name, rows in datasets.items():
            lengths = lengths_of(rows, encoders["head"])
            room = size - _SPECIAL_TOKENS
            longer = np.array([encoders["head"].count_tokens(row.prompt[: size * _CHARS]) > room for row in rows])
            for window, encoder in encoders.items():
                guesses = ranking.estimates(embed(encoder, [row.prompt for row in rows], known), lengths, rows)
                cell = WindowCell(
                    dataset=name,
                    max_tokens=size,
                    window=window,
                    every=ranking.rank(guesses, lengths, seed),
                    longer=ranking.rank(guesses[longer], lengths[longer], seed) if longer.sum() >= LEAST_ROWS else None,
                )
                cells.append(cell)
                tau = f"tau {cell.every.tau:.3f}" + (f", longer {cell.longer.tau:.3f}" if cell.longer else "")
                print(f"{name}, {window} of {size} tokens: {tau}", file=sys.stderr, flush=True)
    return cells


def window_table(cells: Sequence[WindowCell]) -> str:
    header = ["data set", "tokens", "window", "tau, all", "+-", "rows", "tau, longer", "+-", "longer"]
    rows = [
        [
            c.dataset,
            c.max_tokens,
            c.window,
            c.every.tau,
            c.every.std_error,
            c.every.rows,
            *((c.longer.tau, c.longer.std_error, c.longer.rows) if c.longer else (None, None, None)),
        ]
        for c in cells
    ]
    return format_table(header, rows)


def window_metrics(cells: Sequence[WindowCell]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for cell in cells:
        for part, found in (("all", cell.every), ("longer", cell.longer)):
            if found is not None:
                key = f"{cell.dataset}_{cell.max_tokens}tok_{cell.window}_{part}"
                metrics |= {f"{key}_tau": round(found.tau, 4), f"{key}_tau_std_error": round(found.std_error, 4)}
                metrics[f"{key}_rows"] = found.rows
    return metrics


def window_goal(cells: Sequence[WindowCell]) -> Goal:
    """Mean loss of the default window against the best one of each data set and size, on the longer prompts."""
    by_place: dict[tuple[str, int], dict[str, float]] = {}
    for cell in cells:
        if cell.longer is not None:
            by_place.setdefault((cell.dataset, cell.max_tokens), {})[cell.window] = cell.longer.tau
    losses = {
        window: float(np.mean([max(taus.values()) - taus[window] for taus in by_place.values()])) for window in WINDOWS
    }
    note = "mean loss of tau by window: " + ", ".join(f"{window} {loss:.3f}" for window, loss in losses.items())
    value = round(losses[DEFAULT_WINDOW], 4)
    return Goal(metric="default_window_tau_loss", value=value, op="<=", goal=CLOSE_ENOUGH, note=note)


# --- chats ------------------------------------------------------------------------------------------------------------


def measure_chats(datasets: Mapping[str, Sequence[Row]], max_tokens: int, seed: int) -> dict[str, dict[str, Ranking]]:
    """Rank the later turns of conversations by every text that may stand for a chat."""
    encoder = Encoder(max_tokens=max_tokens)
    known: Known = {}
    found: dict[str, dict[str, Ranking]] = {}
    for name, rows in datasets.items():
        lengths = lengths_of(rows, encoder)
        later = np.array([row.turn > 1 for row in rows])
        for form, text in ranking.CHAT_TEXTS.items():
            guesses = ranking.estimates(embed(encoder, [text(row) for row in rows], known), lengths, rows)
            found.setdefault(name, {})[form] = ranking.rank(guesses[later], lengths[later], seed)
            print(f"{name}, text {form}: tau {found[name][form].tau:.3f}", file=sys.stderr, flush=True)
    return found


def chat_table(found: Mapping[str, Mapping[str, Ranking]]) -> str:
    return format_table(
        ["data set", "text of a chat", "tau", "+-", "rows"],
        [[name, form, r.tau, r.std_error, r.rows] for name, forms in found.items() for form, r in forms.items()],
    )


def chat_metrics(found: Mapping[str, Mapping[str, Ranking]]) -> dict[str, float]:
    return {
        f"{name}_chat_{form}_tau{suffix}": round(value, 4)
        for name, forms in found.items()
        for form, r in forms.items()
        for suffix, value in (("", r.tau), ("_std_error", r.std_error))
    }


def chat_goal(found: Mapping[str, Mapping[str, Ranking]]) -> Goal:
    """What the text of a chat gains over the rendered chat, mean over the data sets."""
    gains = {form: [forms[form].tau - forms["rendered"].tau for forms in found.values()] for form in ranking.CHAT_TEXTS}
    means = {form: float(np.mean(values)) for form, values in gains.items()}
    note = "mean gain of tau by text: " + ", ".join(f"{form} {gain:+.3f}" for form, gain in means.items())
    return Goal(metric="chat_text_tau_gain", value=round(means["default"], 4), op=">=", goal=0.0, note=note)
