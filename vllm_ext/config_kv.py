"""Options of the host tier for KV."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ext.config_checks import ConfigError, boolean, choice, integer, number

LOSSLESS, QUANTISED = 16, 8
RETENTION = "retention"
POLICIES = (RETENTION, "lru", "arc")
EARLY, LATE = "early", "late"
_CHUNK_TOKENS = {LOSSLESS: 32, QUANTISED: 64}


@dataclass(frozen=True, kw_only=True)
class KvTierConfig:
    """KV blocks in host memory: how much, in which form, and which of them go first."""

    gib: float = 0.0
    """Host memory for KV, in GiB, of all workers of an engine together; 0 leaves the tier out."""

    bits: int = LOSSLESS
    """16 keeps KV as it is, whatever its type; 8 quantises it: half the bytes, outputs that may differ."""

    chunk_tokens: int | None = None
    """Tokens moved, kept and evicted together, a multiple of vLLM's block; with 8 bits also those that share their
    scales. By default 32 tokens at 16 bits and 64 at 8, or one block where that is more."""

    policy: str = RETENTION
    """Which chunks are evicted first: those of least ``retention`` value, or by ``lru`` or ``arc``, vLLM's own."""

    store: str = EARLY
    """When a chunk is copied: ``early``, as soon as it is full, or ``late``, when its request is preempted or ends."""

    prompt_only: bool = False
    """Leave out the KV of generated tokens, which the next turn of a conversation brings back as its prompt."""

    def __post_init__(self) -> None:
        number("kv_tier.gib", self.gib)
        if self.gib < 0:
            raise ConfigError("kv_tier.gib", self.gib, "must be 0 (no tier) or a number of GiB")
        choice_of_bits = (LOSSLESS, QUANTISED)
        if isinstance(self.bits, bool) or self.bits not in choice_of_bits:
            raise ConfigError("kv_tier.bits", self.bits, "must be 16 or 8")
        if self.chunk_tokens is not None:
            integer("kv_tier.chunk_tokens", self.chunk_tokens, minimum=1)
        choice("kv_tier.policy", self.policy, POLICIES)
        choice("kv_tier.store", self.store, (EARLY, LATE))
        boolean("kv_tier.prompt_only", self.prompt_only)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        return int(self.gib * 2**30)

    def blocks_per_chunk(self, block_size: int) -> int:
        """Return how many of vLLM's blocks make a chunk.

        Raises:
            ConfigError: ``chunk_tokens`` was given and is no multiple of ``block_size``.
        """
        if self.chunk_tokens is None:
            return max(1, _CHUNK_TOKENS[self.bits] // block_size)
        if self.chunk_tokens % block_size:
            allowed = f"must be a multiple of vLLM's KV block, {block_size} tokens here"
            raise ConfigError("kv_tier.chunk_tokens", self.chunk_tokens, allowed)
        return self.chunk_tokens // block_size
