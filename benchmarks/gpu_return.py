"""How long does a conversation wait that comes back with 8k tokens of history: computed again, or from host memory?

Llama-3.1-8B's shape with random weights; so few blocks that other prompts push the conversation's KV off the device.
Its next turn is timed to the first token, beside a new prompt as long, and a turn whose KV is still on the device.

    python benchmarks/gpu_return.py --out returning.json
    python benchmarks/gpu_return.py --dry              # on the CPU
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import gpu_engine
import on_gpu

SETTINGS = ("tier-16", "tier-8")
_HISTORY, _ANSWER, _QUESTION, _REPEATS = 8192, 32, 64, 3
_LOADED = "vllm:kv_offload_load_bytes"


def timed(setting: str, *, dry: bool) -> dict[str, Any]:
    """Return seconds to the first token, of each repeat, by where the history was."""
    history, answer, question = (256, 8, 8) if dry else (_HISTORY, _ANSWER, _QUESTION)
    engine = gpu_engine.Engine(
        setting, "llama-8b", dry=dry, enable_prefix_caching=True, disable_log_stats=False,
        num_gpu_blocks_override=5 * history // 2 // 32, max_num_batched_tokens=128 if dry else 8192,
    )  # fmt: skip
    found: dict[str, list[float]] = {"recomputed_s": [], "from_host_s": [], "on_device_s": [], "loaded_bytes": []}
    number = 0

    def ttft(prompt: Sequence[int]) -> tuple[float, list[int]]:
        req_id = engine.add(prompt, answer)
        engine.finish()
        return engine.seen[req_id].ttft_s, engine.seen[req_id].token_ids

    for _ in range(1 if dry else _REPEATS):
        number += 10
        talk = engine.prompt(number, history)
        found["recomputed_s"].append(ttft(talk)[0])
        _, said = ttft([*talk, *engine.prompt(number + 1, question)])
        talk += engine.prompt(number + 1, question) + said
        found["on_device_s"].append(ttft([*talk, *engine.prompt(number + 2, question)])[0])
        for other in (3, 4, 5):
            ttft(engine.prompt(number + other, history))
        before = engine.counter(_LOADED)
        found["from_host_s"].append(ttft([*talk, *engine.prompt(number + 6, question)])[0])
        found["loaded_bytes"].append(engine.counter(_LOADED) - before)
    engine.close()
    problems = [] if all(found["loaded_bytes"]) else ["nothing was loaded: the history was not in host memory"]
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {
        "start_s": engine.start_s, "history_tokens": history, "problems": problems, "repeats": found, **medians,
        "from_host_over_recomputed": medians["from_host_s"] / medians["recomputed_s"],
    }  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Time all settings, and return 0 if all ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu.add_arguments(parser)
    gpu_engine.add_settings(parser, SETTINGS, limit_s=60.0)
    args = on_gpu.parsed(parser, argv)
    if args.one:
        on_gpu.write(args.out, timed(args.one, dry=args.dry))
        return 0
    found = {}
    for setting, one in gpu_engine.in_processes(__file__, args):
        found[setting] = one
        print(setting, {name: value for name, value in one.items() if name.endswith("_s")}, file=sys.stderr, flush=True)
        on_gpu.write(args.out, found)
    return int(any(one["problems"] for one in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
