"""The loads of the routing benchmark, what serves them, and which latency may not be exceeded. A part of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_runs import REPLICAS, Point, files, sources


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of all runs of a command."""

    data: Path | None = None
    """Folder of public files; None: conversations are made up."""
    held_out: bool = False
    shorter: float = 1.0
    """By this factor, for a quick look."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A load and its servers."""

    name: str
    description: str
    shares: Mapping[str, float]
    """Kind of conversation -> its share of the conversations."""
    model: str
    device: str
    max_model_len: int = 16_384
    tier_gib: float = 0.0
    """Host memory for KV of each replica."""
    slow: float = 1.0
    """How many times as long a step of the first replica takes."""
    limit_ms: float
    """The greatest P90 of the normalised latency, in milliseconds for each output token."""
    guess_per_s: float
    """Conversations per second that `home` carries, about: where the search begins."""
    until_s: float = 120.0

    def point(self, row: str, rate_per_s: float, seed: int, options: Options) -> Point:
        """Return one run."""
        tier = {"kv_tier": {"gib": self.tier_gib}} if self.tier_gib else {}
        until_s = self.until_s / options.shorter
        made: dict[str, Any] = {
            # Blocks of 64 tokens: vLLM's schedulers take half the time of blocks of 16.
            "engine": {"system": "fcfs", "options": tier, "max_model_len": self.max_model_len, "block_size": 64,
                       "max_num_seqs": 256, "max_num_batched_tokens": 2048, "profiled": True},
            "hardware": {"model": self.model, "device": self.device}, "max_time_s": until_s, "until_s": until_s,
            "row": row, "replicas": REPLICAS, "slow": self.slow, "shares": dict(self.shares), "rate_per_s": rate_per_s,
            "seed": seed, "file": files(options.data, self.shares), "held_out": options.held_out, "sources": sources(),
        }  # fmt: skip
        return Point.model_validate(made)


_AGENTS: dict[str, Any] = {
    "shares": {"agents": 1.0}, "model": "llama-2-13b", "device": "a100-80", "tier_gib": 48.0, "limit_ms": 120.0,
}  # fmt: skip
_CHAT: dict[str, Any] = {
    "shares": {"chat": 1.0}, "model": "llama-2-13b", "device": "a100-80", "limit_ms": 60.0,
}  # fmt: skip
CHAT, TIER, AGENTS, CODING, MIXED, SLOW = (
    "chat",
    "chat + tier",
    "agents + tier",
    "coding",
    "mixed sizes",
    "slow replica",
)
SCENES = {
    one.name: one
    for one in (
        Scene(name=CHAT, description="chats, no host memory", guess_per_s=8.0, **_CHAT),
        Scene(name=TIER, description="chats, KV kept in host memory", tier_gib=244.0, guess_per_s=9.0, **_CHAT),
        Scene(name=AGENTS, description="agents that call tools, KV kept in host memory", guess_per_s=1.7, **_AGENTS),
        Scene(
            name=CODING, description="coding sessions, no host memory", shares={"coding": 1.0}, model="llama-3.1-8b",
            device="h100", max_model_len=32_768, limit_ms=40.0, guess_per_s=1.8, until_s=90.0,
        ),
        Scene(
            name=MIXED, description="chats, coding sessions, and single prompts of 8,000 tokens; no host memory",
            shares={"chat": 0.763, "coding": 0.076, "document": 0.161}, model="llama-3.1-8b", device="h100",
            max_model_len=32_768, limit_ms=40.0, guess_per_s=18.0, until_s=60.0,
        ),
        Scene(name=SLOW, description="as agents + tier; steps of one replica take twice as long", slow=2.0,
              guess_per_s=1.5, **_AGENTS),
    )
}  # fmt: skip
