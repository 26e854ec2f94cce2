"""Does KV in 8 bits on the device find more of conversations' history than prefix caching, in the same memory?

Llama-3.1-8B's shape with random weights; conversations take turns, and together have more KV than the device holds.
vLLM with prefix caching, the same with our kernel, and with 30 % of the blocks' memory for KV in 8 bits: how much of
the prompts was found, and how long first tokens took.

    python benchmarks/gpu_talks.py --out conversations.json
    python benchmarks/gpu_talks.py --dry              # on the CPU
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import gpu_engine
import on_gpu

SETTINGS = ("stock", "own", "int8")
_TALKS, _TURNS, _QUESTION, _ANSWER, _AT_ONCE, _BLOCKS = 40, 5, 320, 48, 8, 1400


def talked(setting: str, *, dry: bool) -> dict[str, Any]:
    """Let conversations take turns, and return what was found of their history."""
    talks, turns, question, answer, at_once, blocks = (
        (6, 3, 40, 8, 2, 22) if dry else (_TALKS, _TURNS, _QUESTION, _ANSWER, _AT_ONCE, _BLOCKS)
    )
    engine = gpu_engine.Engine(
        setting, "llama-8b", dry=dry, enable_prefix_caching=True, num_gpu_blocks_override=blocks,
        max_num_batched_tokens=128 if dry else 8192, max_model_len=256 if dry else 8192,
        disable_log_stats=False,
    )  # fmt: skip
    history: list[list[int]] = [[] for _ in range(talks)]
    ttft, prompts, later = [], 0, 0
    began = engine.now()
    for turn in range(turns):
        for first in range(0, talks, at_once):
            running = {}
            for talk in range(first, min(first + at_once, talks)):
                history[talk] += engine.prompt(1000 * turn + talk, question)
                running[talk] = engine.add(history[talk], answer)
                prompts += len(history[talk])
                later += len(history[talk]) if turn else 0
            engine.finish()
            for talk, req_id in running.items():
                history[talk] += engine.seen[req_id].token_ids
                if turn:
                    ttft.append(engine.seen[req_id].ttft_s)
    hits = engine.counter("vllm:prefix_cache_hits")
    found = {
        "start_s": engine.start_s, "served_s": engine.now() - began, "prompt_tokens": prompts, "found_tokens": hits,
        "found_share_of_later_turns": hits / later, "mean_ttft_s": statistics.fmean(ttft),
        "p90_ttft_s": statistics.quantiles(ttft, n=10)[-1], "kv_device": engine.state().get("kv_device"),
    }  # fmt: skip
    engine.close()
    return found


def main(argv: Sequence[str]) -> int:
    """Serve all settings, and return 0 if all ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu.add_arguments(parser)
    gpu_engine.add_settings(parser, SETTINGS, limit_s=60.0)
    args = on_gpu.parsed(parser, argv)
    if args.one:
        on_gpu.write(args.out, talked(args.one, dry=args.dry))
        return 0
    found = {}
    for setting, one in gpu_engine.in_processes(__file__, args):
        found[setting] = one
        print(setting, {name: value for name, value in one.items() if name != "tail"}, file=sys.stderr, flush=True)
        on_gpu.write(args.out, found)
    return int(any(one["problems"] for one in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
