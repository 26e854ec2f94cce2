"""Does every part start on this GPU, and does it compute what vLLM's own kernels do?

A tiny Llama answers the same requests in engines of their own: vLLM as it is, with its Triton kernel, with our kernel,
with few blocks and a host tier in 16 and in 8 bits (so that requests are preempted and come back), and with a part of
the device's KV in 8 bits. Logprobs are compared with vLLM's up to the first token that differs. Two kernels of 16 bits
may choose otherwise where tokens are nearly equally likely, and then go on apart: on an H200 vLLM's own two kernels had
78 % of the tokens in common. So a token that differs must be one that vLLM held nearly as likely as its own.
Exit status 1: an engine answers wrongly, and the result names it under ``wrong``; 3: one failed, or did not try what it
was started for.

    python benchmarks/gpu/gpu_right.py --out right.json
    python benchmarks/gpu/gpu_right.py --dry              # on the CPU
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import gpu_engine
import on_gpu

REFERENCE = "stock"
SETTINGS = (REFERENCE, "triton", "own", "tier-16", "tier-8", "int8")
_REQUESTS, _PROMPT, _OUTPUT, _ROUNDS = 8, 300, 24, 2
_SHORT_OF_BLOCKS = ("tier-16", "tier-8", "int8")
_FEW_BLOCKS = 64
"""Of 32 tokens: 6 of 8 requests fit, so that the tier's are preempted, and 4 beside KV in 8 bits, which the second
round finds of the first."""
_LIKELY = 5
"""Tokens of each place whose logprobs are kept."""
_MOST_LOGPROB = 0.15
"""How far a token's logprob may be off before the first token that differs, and how much less likely than its own vLLM
may hold that one. KV in 8 bits is allowed twice as much; engines that compute alike, on one machine, differ by nothing.
"""


def answered(setting: str, *, dry: bool) -> dict[str, Any]:
    """Start an engine, let it answer, and return what it said and did; None stands for a logprob that is no number."""
    arguments: dict[str, Any] = {"disable_log_stats": False, "max_model_len": 512}
    if not dry:
        arguments |= gpu_engine.beside_others(gib=1.0)
    if setting in _SHORT_OF_BLOCKS:
        arguments |= {"num_gpu_blocks_override": _FEW_BLOCKS, "enable_prefix_caching": True}
    engine = gpu_engine.Engine(setting, "tiny", dry=dry, drawn=True, **arguments)
    rounds = []
    for _ in range(_ROUNDS):
        ids = [engine.add(engine.prompt(number, _PROMPT), _OUTPUT, logprobs=_LIKELY) for number in range(_REQUESTS)]
        engine.finish()
        rounds.append([engine.seen[req_id] for req_id in ids])
    found = {
        "start_s": engine.start_s,
        "scheduler": type(engine.scheduler).__name__,
        "cudagraph_mode": engine.cudagraph_mode,
        "preemptions": engine.counter("vllm:num_preemptions"),
        "stored_bytes": engine.counter("vllm:kv_offload_store_bytes"),
        "loaded_bytes": engine.counter("vllm:kv_offload_load_bytes"),
        "unfinished": sum(not seen.ended for seen in engine.seen.values()),
        "state": {key: engine.state().get(key) for key in ("attention", "kv_device", "fallbacks")},
        "tokens": [seen.token_ids for round_ in rounds for seen in round_],
        "logprobs": [[p if math.isfinite(p) else None for p in seen.logprobs] for round_ in rounds for seen in round_],
        "likely": [
            [[[token, p] for token, p in place.items() if math.isfinite(p)] for place in seen.likely]
            for round_ in rounds
            for seen in round_
        ],
    }
    engine.close()
    return found


def compared(found: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    """Return how many tokens are the reference's, and how far logprobs are off as long as they are.

    And by how much less likely than its own the reference held a token where they part, at most; at least that, if it
    is not among the likeliest.
    """
    equal, total, off, apart = 0, 0, 0.0, 0.0
    for mine, theirs, mine_p, theirs_p, likely in zip(
        found["tokens"], reference["tokens"], found["logprobs"], reference["logprobs"], reference["likely"],
        strict=True,
    ):  # fmt: skip
        same = next((at for at, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), len(mine))
        equal, total = equal + same, total + len(theirs)
        pairs = zip(mine_p[:same], theirs_p[:same], strict=False)
        off = max([off, *(abs(a - b) for a, b in pairs if a is not None and b is not None)])
        if same < min(len(mine), len(likely)) and (held := dict(likely[same])):
            own, least = held.get(theirs[same], max(held.values())), min(held.values())
            apart = max(apart, own - held.get(mine[same], least))
    numberless = sum(one is None for logprobs in found["logprobs"] for one in logprobs)
    return {
        "tokens_equal_share": equal / total,
        "largest_logprob_difference": off,
        "largest_difference_of_a_choice": apart,
        "logprobs_that_are_no_numbers": numberless,
    }


def wrong(setting: str, found: dict[str, Any]) -> list[str]:
    """Return what is wrong with an engine's answers, in words."""
    room = 2.0 if setting in ("tier-8", "int8") else 1.0
    said = []
    if found["largest_difference_of_a_choice"] > room * _MOST_LOGPROB:
        said.append(f"a token's logprob is {found['largest_difference_of_a_choice']:.3f} below that of vLLM's choice")
    if found["largest_logprob_difference"] > room * _MOST_LOGPROB:
        said.append(f"a logprob is off by {found['largest_logprob_difference']:.3f}")
    if found["logprobs_that_are_no_numbers"]:
        said.append(f"{found['logprobs_that_are_no_numbers']} logprobs are no numbers")
    if found["unfinished"]:
        said.append(f"{found['unfinished']} requests never ended")
    if found["state"].get("fallbacks"):
        said.append(f"{found['state']['fallbacks']} steps fell back to FCFS")
    return said


def untried(setting: str, found: dict[str, Any]) -> list[str]:
    """Return what an engine was started for and did not do, in words: then its answers say nothing of it."""
    said, attention = [], found["state"].get("attention") or {}
    if setting.startswith("tier") and not (found["preemptions"] and found["loaded_bytes"]):
        said.append("nobody was preempted and loaded again: the tier was not tried")
    if setting in ("own", "int8") and not attention.get("steps", {}).get("own"):
        said.append("our kernel served no step")
    if setting == "int8" and not (found["state"].get("kv_device") or {}).get("read_tokens"):
        said.append("no KV in 8 bits was read")
    return said


def judge(setting: str, one: dict[str, Any], answers: dict[str, Any], report: on_gpu.Report) -> None:
    """Compare an engine's answers with vLLM's, as far as both are there, and report what is wrong."""
    if "tokens" not in one:
        return
    answers[setting] = {name: one.pop(name) for name in ("tokens", "logprobs", "likely")}
    if REFERENCE not in answers:
        one["problems"].append(f"{REFERENCE} has no answers to compare with")
        return
    one.update(compared(answers[setting], answers[REFERENCE]))
    if one.setdefault("wrong", wrong(setting, one)):
        report.add_wrong(setting)
    one["problems"] += untried(setting, one)


def main(argv: Sequence[str]) -> int:
    """Compare all settings, and return 0 if all are right, 1 if one is wrong, else 3."""
    args = gpu_engine.parse(__doc__, argv, SETTINGS)
    report = on_gpu.Report(args.out, dry=args.dry)
    if args.one:
        report.found |= answered(args.one, dry=args.dry)
        return report.end()
    answers: dict[str, Any] = {}
    for name, one in gpu_engine.in_processes(__file__, args, report):
        judge(name, one, answers, report)
        said = [*one.get("wrong", []), *one["problems"]]
        print(name, "problems:", said or "none", file=sys.stderr, flush=True)
    return report.end(complete=gpu_engine.all_complete(report))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
