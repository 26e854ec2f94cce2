"""How long does a conversation wait that comes back with 8k tokens of history: computed again, or from host memory?

Llama-3.1-8B's shape with random weights; so few blocks that other prompts push the conversation's KV off the device.
Its next turn is timed to the first token, beside a new prompt as long, and a turn whose KV is still on the device.

    python benchmarks/gpu/gpu_return.py --out returning.json
    python benchmarks/gpu/gpu_return.py --dry              # on the CPU
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

import gpu_engine
import on_gpu

SETTINGS = ("tier-16", "tier-8")
_HISTORY, _ANSWER, _QUESTION, _REPEATS = 8192, 32, 64, 3
_LOADED = "vllm:kv_offload_load_bytes"


class Talker:
    """Holds conversations with an engine, one after the other, and notes seconds to first tokens."""

    def __init__(self, engine: gpu_engine.Engine, history: int, answer: int, question: int) -> None:
        self._engine, self._history, self._answer, self._question = engine, history, answer, question
        self.found: dict[str, list[float]] = {
            "recomputed_s": [],
            "from_host_s": [],
            "on_device_s": [],
            "loaded_bytes": [],
        }

    def talk(self, number: int) -> None:
        """Let a conversation begin, go on, be pushed off the device by others, and come back."""
        engine, found = self._engine, self.found
        talk = engine.prompt(number, self._history)
        found["recomputed_s"].append(self._ttft(talk)[0])
        _, said = self._ttft([*talk, *self._asked(number + 1)])
        talk += self._asked(number + 1) + said
        found["on_device_s"].append(self._ttft([*talk, *self._asked(number + 2)])[0])
        for other in (3, 4, 5):
            self._ttft(engine.prompt(number + other, self._history))
        before = engine.counter(_LOADED)
        found["from_host_s"].append(self._ttft([*talk, *self._asked(number + 6)])[0])
        found["loaded_bytes"].append(engine.counter(_LOADED) - before)

    def summary(self) -> dict[str, Any]:
        """Return medians, and what is wrong with them."""
        medians = {name: statistics.median(values) for name, values in self.found.items()}
        return {
            "repeats": self.found, **medians,
            "from_host_over_recomputed": medians["from_host_s"] / medians["recomputed_s"],
            "problems": [] if all(self.found["loaded_bytes"])
            else ["nothing was loaded: the history was not in host memory"],
        }  # fmt: skip

    def _asked(self, number: int) -> list[int]:
        return self._engine.prompt(number, self._question)

    def _ttft(self, prompt: Sequence[int]) -> tuple[float, list[int]]:
        req_id = self._engine.add(prompt, self._answer)
        self._engine.finish()
        return self._engine.seen[req_id].ttft_s, self._engine.seen[req_id].token_ids


def timed(setting: str, report: on_gpu.Report, *, dry: bool) -> None:
    """Report seconds to the first token, of each repeat, by where the history was."""
    history, answer, question = (256, 8, 8) if dry else (_HISTORY, _ANSWER, _QUESTION)
    engine = gpu_engine.Engine(
        setting, "llama-8b", dry=dry, enable_prefix_caching=True, disable_log_stats=False,
        num_gpu_blocks_override=5 * history // 2 // 32, max_num_batched_tokens=128 if dry else 8192,
    )  # fmt: skip
    report.found |= {"start_s": engine.start_s, "history_tokens": history}
    talker = Talker(engine, history, answer, question)
    for repeat in range(1 if dry else _REPEATS):
        talker.talk(10 * (repeat + 1))
        report.found |= talker.summary()
        report.write()
    engine.close()


def main(argv: Sequence[str]) -> int:
    """Time all settings, and return 0 if all ran, else 3."""
    args = gpu_engine.parse(__doc__, argv, SETTINGS)
    report = on_gpu.Report(args.out, dry=args.dry)
    if args.one:
        timed(args.one, report, dry=args.dry)
        return report.end()
    for name, one in gpu_engine.in_processes(__file__, args, report):
        print(name, {key: value for key, value in one.items() if key.endswith("_s")}, file=sys.stderr, flush=True)
    return report.end(complete=gpu_engine.all_complete(report))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
