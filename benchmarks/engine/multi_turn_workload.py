"""The conversations of `multi_turn.py`, and how much KV they come to.

A part of multi_turn.py: it is run from there. Conversations are those of the simulator: recorded or made up, with think
times, the same for every row of a repeat because all draws are made before a row is served.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ext.simulation.workloads.requests import SimRequest, Workload
from vllm_ext.simulation.workloads.spec import WorkloadSpec
from vllm_ext.simulation.workloads.token_ids import END_ID

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "multi_turn" / "sharegpt.jsonl.gz"
SYNTHETIC = "pensieve-sharegpt"
WARMUP = WorkloadSpec(
    source="fixed:96:8",
    arrivals="at-once",
    num_requests=4,
    system_prompt_tokens=64,
    announce="hidden",
    max_tokens=64,
)
"""Served before the clock starts. Nothing measured begins with its system prompt, so that none of its KV is found."""

UNLOADED, SATURATED = "unloaded", "saturated"
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class Extent:
    """What all conversations of a workload add up to."""

    conversations: int
    turns: int
    context_tokens: int
    """Of each conversation when it has ended, summed: the KV that keeping everything would take."""
    history_tokens: int
    """Of the prompts, what earlier turns said: what stateless serving computes again."""
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class ModelKv:
    """The KV of one token, of all layers, on the device."""

    num_layers: int
    bytes_per_token: int


def spec(args: argparse.Namespace, repeat: int, rate_per_s: float) -> WorkloadSpec:
    """Return conversations that begin as a Poisson process; a rate only stretches the time between their beginnings."""
    return _spec(args, repeat, args.num_conversations, arrivals="poisson", rate_per_s=rate_per_s, think_s=args.think_s)


def calibration(args: argparse.Namespace) -> dict[str, WorkloadSpec]:
    """Return conversations whose clients do not think: some one after the other, and all with every seat taken."""
    count = max(2, args.num_conversations // 4)
    return {
        UNLOADED: _spec(args, 0, count, arrivals="closed-loop", clients=1, think_s=0.0),
        SATURATED: _spec(args, 0, args.num_conversations, arrivals="closed-loop", clients=args.max_num_seqs, think_s=0),
    }


def extent(workload: Workload) -> Extent:
    """Add up a workload whose conversations begin by the clock, by following each to its end."""
    conversations = [list(_turns(workload, opening)) for opening in workload.start()]
    turns = [turn for conversation in conversations for turn in conversation]
    return Extent(
        conversations=len(conversations),
        turns=len(turns),
        context_tokens=sum(sum(conversation[-1]) for conversation in conversations),
        history_tokens=sum(sum(turn) for conversation in conversations for turn in conversation[:-1]),
        prompt_tokens=sum(prompt for prompt, _ in turns),
        output_tokens=sum(answer for _, answer in turns),
    )


def _turns(workload: Workload, request: SimRequest | None) -> Iterator[tuple[int, int]]:
    """Yield the lengths of prompt and answer of each turn of a conversation."""
    while request is not None:
        answer = min(request.output_tokens, request.max_tokens)
        yield request.prompt_tokens, answer
        request = next(iter(workload.after(request, request.arrival_s, [0] * answer)), None)


def kv_of(model: Path, overrides: Mapping[str, Any], dtype_bytes: int) -> ModelKv:
    """Return what a model keeps of a token.

    Raises:
        ValueError: its ids do not reach as far as those of the conversations.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8")) | dict(overrides)
    if config["vocab_size"] < END_ID:
        raise ValueError(f"vocab_size={config['vocab_size']} of the model: must be at least {END_ID}")
    layers, heads = config["num_hidden_layers"], config.get("num_key_value_heads", config["num_attention_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return ModelKv(num_layers=layers, bytes_per_token=2 * layers * heads * head_dim * dtype_bytes)


def set_sizes(args: argparse.Namespace, total: Extent, bytes_per_token: int) -> None:
    """Fill in the sizes of tier and device memory that were not given.

    The tier gets a quarter of what all conversations take at 16 bits, the device an eighth, and at least what one
    request may take.
    """
    if args.tier_gib is None:
        args.tier_gib = total.context_tokens / 4 * bytes_per_token / 2**30
    if args.num_gpu_blocks is None:
        tokens = max(total.context_tokens / 8, args.max_model_len)
        args.num_gpu_blocks = int(-(-tokens // args.block_size)) + 1  # the first block is never given out


def _spec(args: argparse.Namespace, repeat: int, count: int, **more: Any) -> WorkloadSpec:
    source: dict[str, Any] = {"source": SYNTHETIC}
    if args.conversations is not None:
        source = {"source": str(args.conversations), "conversations": True, "sample": "without-replacement"}
    return WorkloadSpec(
        **source,
        **more,
        min_turns=args.min_turns,
        max_turns=args.max_turns,
        num_requests=count,
        scale_prompt=args.length_scale,
        scale_output=args.length_scale,
        max_model_len=args.max_model_len,
        announce="hidden",  # the engine core ends a request there; only systems marked `oracle` could read it
        seed=args.seed + repeat,
    )
