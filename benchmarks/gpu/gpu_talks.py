"""Does KV in 8 bits on the device find more of conversations' history than prefix caching, in the same memory?

Llama-3.1-8B's shape with random weights; conversations take turns, and together have more KV than the device holds.
vLLM with prefix caching, the same with our kernel, and with 30 % of the blocks' memory for KV in 8 bits: how much of
the prompts was found, and, of engines that run one after the other, how long first tokens took.

Steps with KV in 8 bits run eagerly: our backend lets no CUDA graph be captured with it, while `stock` and `own` replay
their decode steps as graphs. So first-token and serving times of `int8` hold that difference as well; what was found of
the history does not. The result has each engine's ``cudagraph_mode``.

    python benchmarks/gpu/gpu_talks.py --out conversations.json
    python benchmarks/gpu/gpu_talks.py --dry              # on the CPU
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

import gpu_engine
import on_gpu

SETTINGS = ("stock", "own", "int8")
DETAILS = "int8 runs eagerly, without CUDA graphs, and the others' decode steps with: compare times with that in mind"
_TALKS, _TURNS, _QUESTION, _ANSWER, _AT_ONCE, _BLOCKS = 40, 5, 320, 48, 8, 1400


class Talks:
    """Conversations that take turns with an engine."""

    def __init__(self, engine: gpu_engine.Engine, talks: int, question: int, answer: int, at_once: int) -> None:
        self._engine, self._question, self._answer, self._at_once = engine, question, answer, at_once
        self._history: list[list[int]] = [[] for _ in range(talks)]
        self._ttft: list[float] = []
        self._prompts, self._later = 0, 0
        self._began = engine.now()

    def take(self, turn: int) -> None:
        """Let every conversation take a turn, some of them at once."""
        engine, talks = self._engine, len(self._history)
        for first in range(0, talks, self._at_once):
            running = {}
            for talk in range(first, min(first + self._at_once, talks)):
                history = self._history[talk]
                history += engine.prompt(1000 * turn + talk, self._question)
                running[talk] = engine.add(history, self._answer)
                self._prompts += len(history)
                self._later += len(history) if turn else 0
            engine.finish()
            for talk, req_id in running.items():
                self._history[talk] += engine.seen[req_id].token_ids
                self._ttft += [engine.seen[req_id].ttft_s] if turn else []

    def summary(self, *, timed: bool) -> dict[str, Any]:
        """Return what was found of their history so far, from the second turn on; and how long it took, if asked."""
        hits = self._engine.counter("vllm:prefix_cache_hits")
        times = {
            "served_s": self._engine.now() - self._began, "mean_ttft_s": statistics.fmean(self._ttft),
            "p90_ttft_s": statistics.quantiles(self._ttft, n=10)[-1],
        }  # fmt: skip
        return {
            "prompt_tokens": self._prompts, "found_tokens": hits, "found_share_of_later_turns": hits / self._later,
            "kv_device": self._engine.state().get("kv_device"), **(times if timed else {}),
        }  # fmt: skip


def talked(setting: str, report: on_gpu.Report, *, dry: bool, alone: bool) -> None:
    """Let conversations take turns, and report after each what was found of their history."""
    talks, turns, question, answer, at_once, blocks = (
        (6, 3, 40, 8, 2, 22) if dry else (_TALKS, _TURNS, _QUESTION, _ANSWER, _AT_ONCE, _BLOCKS)
    )
    engine = gpu_engine.Engine(
        setting, "llama-8b", dry=dry, enable_prefix_caching=True, num_gpu_blocks_override=blocks,
        max_num_batched_tokens=128 if dry else 8192, max_model_len=256 if dry else 8192,
        disable_log_stats=False, **({} if dry else gpu_engine.beside_others(gib=8.0)),
    )  # fmt: skip
    report.found |= {"start_s": engine.start_s, "cudagraph_mode": engine.cudagraph_mode}
    held = Talks(engine, talks, question, answer, at_once)
    for turn in range(turns):
        held.take(turn)
        report.found |= {"turns": turn + 1, **(held.summary(timed=alone) if turn else {})}
        report.write()
    engine.close()


def main(argv: Sequence[str]) -> int:
    """Serve all settings, and return 0 if all ran, else 3."""
    args = gpu_engine.parse(__doc__, argv, SETTINGS)
    if args.one:
        report = on_gpu.Report(args.out)
        talked(args.one, report, dry=args.dry, alone=args.at_once == 1)
        return report.end()
    report = on_gpu.Report(args.out, dry=args.dry, details=DETAILS)
    for name, one in gpu_engine.in_processes(__file__, args, report):
        print(name, {key: value for key, value in one.items() if key != "tail"}, file=sys.stderr, flush=True)
    return report.end(complete=gpu_engine.all_complete(report))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
