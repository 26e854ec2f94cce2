"""How fast is the prompt encoder, and which part of a prompt should it read?

Question: how many prompts a second are embedded on one and on two CPU threads, by length and batch size; which window
of a long prompt (head, tail, half of each) and how many tokens rank output lengths best; and which text should stand
for a chat: the last question, with earlier turns, with how much of the system prompt, or the rendered whole.

Method, speed: prompts of exactly so many tokens through `Encoder.encode`, fastest of n calls, the cells taking turns.
Prompts per second are of wall time, so run it on an idle machine; the CPU time of the process stands beside it.

Method, ranking: real prompts with their recorded answers from the folder of shared data, duplicates dropped. Every
row's length is estimated from its ten nearest neighbours by ALISE's Algorithm 1 (leave one out; of a row's own
conversation only earlier turns count), and Kendall's tau between estimates and lengths is reported with a bootstrap's
standard error: over all rows, and over the prompts longer than the window, on which alone windows differ. Chats have
one of four long system prompts, and only turns after the first are ranked. Lengths are tokens of the encoder's
tokenizer.

Output: prompts per second and CPU milliseconds per prompt; tau by data set, window and tokens; tau by text of a chat.

    python benchmarks/prediction_encoder.py --quick
    python benchmarks/prediction_encoder.py --out benchmarks/results/prediction_encoder.json
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import prediction_ranking as ranking
import prediction_texts as texts
from prediction_ranking import Row

from vllm_ext.observability.results import Result, Workload, add_arguments, command, emit, format_table
from vllm_ext.prediction.encoder import DEFAULT_WINDOW, Encoder

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
_VOCABULARY = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")
"""One token each."""
_SPECIAL_TOKENS = 2


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination of the speed measurement."""

    threads: int
    tokens: int
    batch: int

    @property
    def key(self) -> str:
        return f"{self.threads}t_{self.tokens}tok_{self.batch}b"


@dataclass(kw_only=True)
class Speed:
    """Of the fastest call; seconds for the whole batch."""

    wall_s: float = float("inf")
    cpu_s: float = float("inf")


# --- speed ------------------------------------------------------------------------------------------------------------


def measure_speed(
    threads: Sequence[int], lengths: Sequence[int], batches: Sequence[int], repeats: int, seed: int
) -> dict[Cell, Speed]:
    """Time every combination; the number of threads belongs to the process, so one follows the other."""
    found = {}
    rng = np.random.default_rng(seed)
    for count in threads:
        encoder = Encoder(threads=count, max_tokens=max(lengths), window="head", batch_size=max(batches))
        cells = [Cell(threads=count, tokens=n, batch=b) for n, b in itertools.product(lengths, batches)]
        speeds = {cell: Speed() for cell in cells}
        for _ in range(repeats):
            for cell, speed in speeds.items():
                prompts = random_prompts(rng, cell.batch, cell.tokens)
                started = time.perf_counter(), time.process_time()
                encoder.encode(prompts)
                speed.wall_s = min(speed.wall_s, time.perf_counter() - started[0])
                speed.cpu_s = min(speed.cpu_s, time.process_time() - started[1])
        found |= speeds
    return found


def random_prompts(rng: np.random.Generator, count: int, tokens: int) -> list[str]:
    """Return prompts of exactly so many tokens of the default encoder, special ones included."""
    return [" ".join(row) for row in rng.choice(_VOCABULARY, size=(count, tokens - _SPECIAL_TOKENS))]


def speed_table(found: Mapping[Cell, Speed]) -> str:
    header = ["threads", "tokens", "batch", "prompts/s", "wall ms per prompt", "CPU ms per prompt"]
    return format_table(
        header,
        [
            [c.threads, c.tokens, c.batch, c.batch / s.wall_s, s.wall_s / c.batch * 1e3, s.cpu_s / c.batch * 1e3]
            for c, s in found.items()
        ],
    )


def speed_metrics(found: Mapping[Cell, Speed]) -> dict[str, float]:
    metrics = {}
    for cell, speed in found.items():
        metrics[f"{cell.key}_prompts_per_s"] = round(cell.batch / speed.wall_s, 2)
        metrics[f"{cell.key}_cpu_ms_per_prompt"] = round(speed.cpu_s / cell.batch * 1e3, 3)
    return metrics


# --- the whole --------------------------------------------------------------------------------------------------------


def rows_of(folder: Path, quick: bool, seed: int) -> tuple[dict[str, list[Row]], dict[str, list[Row]]]:
    """Data sets for windows, with a fair share of long prompts, and conversations for the texts of chats."""
    few, some = (150, 40) if quick else (600, 160)
    single = {
        "wildchat": ranking.single_turn(folder, "single_turn/wildchat_first1445", {}, few, seed),
        "squality": ranking.documents(folder, "long_docs/squality", some, seed),
    }
    talks = {"sharegpt": ranking.chats(folder, "multi_turn/sharegpt", 25 if quick else 150, seed)}
    if not quick:
        o3 = {"model": "o3-mini-2025-01-31"}
        single |= {
            "arena_hard": ranking.single_turn(folder, "single_turn/arena_hard", o3, few, seed),
            "dolly": ranking.single_turn(folder, "single_turn/dolly_3k", {}, few, seed),
        }
        talks["oasst1"] = ranking.chats(folder, "multi_turn/oasst1_en", 400, seed)
    return single, talks


def main(argv: Sequence[str]) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the shared data (default: ../shared/data)")
    parser.add_argument("--only", choices=("speed", "ranking"), help="one half of the measurement")
    args = parser.parse_args(argv)
    if args.only != "speed" and not (args.data / "single_turn").is_dir():
        parser.error(f"--data {args.data.name}: no folder with single_turn/ in it; --only speed goes without")
    threads, batches = (1, 2), (1, 16) if args.quick else (1, 4, 16, 64)
    lengths, repeats = ((16, 64), 2) if args.quick else ((16, 64, 128, 256), 5)
    sizes, chat_tokens = ((64,), 64) if args.quick else ((128, 64, 256), 128)
    tables, metrics, goals, used = [], {}, [], []
    if args.only != "ranking":
        speeds = measure_speed(threads, lengths, batches, repeats, args.seed)
        tables.append(speed_table(speeds))
        metrics |= speed_metrics(speeds)
    if args.only != "speed":
        single, talks = rows_of(args.data, args.quick, args.seed)
        windows = texts.measure_windows(single, sizes, args.seed)
        forms = texts.measure_chats(talks, chat_tokens, args.seed)
        tables += [texts.window_table(windows), texts.chat_table(forms)]
        metrics |= texts.window_metrics(windows) | texts.chat_metrics(forms)
        goals += [texts.window_goal(windows), texts.chat_goal(forms)]
        used = [row for rows in (*single.values(), *talks.values()) for row in rows]
    result = Result(
        name="prediction_encoder",
        command=command(argv, "benchmarks/prediction_encoder.py"),
        config={
            "model": Encoder(max_tokens=max(lengths)).name,
            "threads": threads,
            "prompt_tokens": lengths,
            "batches": batches,
            "repeats": repeats,
            "window_tokens": sizes,
            "default_window": DEFAULT_WINDOW,
            "chat_tokens": chat_tokens,
            "neighbours": ranking.NEIGHBOURS,
            "bootstraps": ranking.BOOTSTRAPS,
        },
        seed=args.seed,
        workload=Workload(name="shared data", rows=len(used), sha256=ranking.checksum(used)),
        metrics=metrics,
        goals=goals,
    )
    emit(result, tables, args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
