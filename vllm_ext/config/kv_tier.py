"""Options of the host tier for KV."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from vllm_ext.config.errors import ConfigError
from vllm_ext.config.model import Flag, Options, number_or_text

BLOCK_TOKENS = 64
"""Tokens of a KV block under a tier unless the user says otherwise: see docs/conversations.md."""
LOSSLESS, QUANTISED = 16, 8
RETENTION, TAIL, LEADING = "retention", "tail", "leading"
PREFIX_POLICIES = (RETENTION, TAIL, "lru", "arc")
"""Those that leave what vLLM's lookup from the front finds."""
POLICIES = (*PREFIX_POLICIES, LEADING)
AUTO = "auto"
EARLY, AHEAD = "early", "ahead"
STORES = (EARLY, AHEAD)
BETWEEN, IN_STEP = "between", "in-step"
FUSED, OFF = "fused", "off"
BY_TURNS, BY_AGE = "turns", "age"
RETURNS = (BY_TURNS, BY_AGE)
PAYING, ALL = "paying", "all"
COPIES = (PAYING, ALL)
_DEFAULTS = {
    "gib": 0.0,
    "bits": LOSSLESS,
    "policy": RETENTION,
    "returns": BY_AGE,
    "store": AUTO,
    "load": BETWEEN,
    "copies": PAYING,
    "gaps": OFF,
    "prompt_only": AUTO,
}
"""Of the options that are a system's to choose where the user does not."""


def _whole(path: str) -> str:
    """A path that means the same to every process, whatever its working directory."""
    return os.path.abspath(os.path.expanduser(path)) if path else ""


def _gib(value: object) -> float | str | None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
    if not (number or value is None or value == AUTO):
        raise ValueError(f"must be a number of GiB of at least 0, or {AUTO}")
    return float(value) if isinstance(value, int) else value  # type: ignore[return-value]


class KvTierConfig(Options):
    """KV blocks in host memory: how much, in which form, and which of them go first."""

    at: ClassVar[str] = "kv_tier"

    gib: Annotated[
        float | Literal["auto"] | None,
        PlainValidator(_gib),
        Flag("--kv-tier-gib", type=number_or_text, metavar="GIB|auto"),
    ] = None
    """Host memory for KV blocks that leave the device, in GiB, for all workers of an engine together. 0 switches the
    tier off. ``auto`` takes twice the device's KV, but at most 30 % of the host memory that is free, which the replicas
    of a machine share. Default: ``auto`` with ``pensieve``, except on vLLM's CPU backend; else 0."""

    bits: Annotated[Literal[16, 8] | None, Flag("--kv-tier-bits", type=int, metavar="N")] = None
    """Bits per KV element in host memory. 16 keeps KV as it is, whatever its type. 8 quantises it to half the size, so
    outputs may differ. Default: the system's, 8 for ``alise`` and 16 for all others."""

    policy: Literal["retention", "tail", "lru", "arc", "leading"] | None = None
    """Which chunks are evicted first. ``retention``: the ends of the conversations with the least retention value.
    ``tail``: the ends of the conversations that were not used for longest. ``leading``, for ``gaps``: any chunk, least
    retention value first. ``lru`` and ``arc``: vLLM's own, which know no conversations. Default: the system's, else
    ``retention``."""

    returns: Literal["turns", "age"] | None = None
    """At which rate a conversation is expected to come back, for the retention value. ``age``: 1 / time since its last
    turn. ``turns``: the share that came back after as many turns, over that time; it gains nothing, and is for
    ``pensieve-published-turns``. Default: the system's, else ``age``."""

    ttl_s: float = Field(default=0.0, ge=0)
    """Seconds without use after which a conversation is dropped; 0: never. With ``kv_ttl_s`` a client can shorten it
    for its own conversation."""

    salt_share: float = Field(default=1.0, gt=0, le=1)
    """Largest share of the tier that one ``cache_salt`` may fill. In a full tier the limit also holds for all salts
    together that were used by a single request."""

    store: Literal["auto", "early", "ahead"] | None = None
    """When a chunk is copied to host memory. ``early``: as soon as it is full. ``ahead``: when its request has left
    (ended or preempted) and few blocks can be taken without losing KV. ``auto``: ``ahead`` where possible, else
    ``early``. Default: the system's, else ``auto``; with a disk ``early``."""

    free_fraction: float = Field(default=0.25, gt=0, lt=1)
    """Share of the device's blocks that ``store: ahead`` keeps free or copied."""

    load: Literal["between", "in-step", "auto"] | None = None
    """When KV is brought back. ``between``: between steps; the request waits while others run. ``in-step``: layer by
    layer in the step that computes the request; all requests of that step wait. ``auto``: whichever costs less.
    Default: the system's, else ``between``."""

    copies: Literal["paying", "all"] | None = None
    """Which copies are made. ``paying``: a blocking store only if it is expected to save more time than it takes, and a
    load behind a gap only if recomputing the block takes longer. ``all``: everything that is about to be overwritten is
    stored, and everything that is held is loaded. Default: the system's, else ``paying``."""

    device_int8_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the device's KV memory in which evicted KV, and that of preempted requests, stays in 8 bits instead of
    being dropped. Twice as many tokens fit there; attention reads them in place. Not beside a host tier."""

    prompt_only: Literal[True, False, "auto"] | None = None
    """Whether the KV of generated tokens is left out. A next turn needs it, unless the chat template drops these
    tokens, as templates of reasoning models do. ``auto``: left out once next turns with the same ``cache_salt`` and
    LoRA adapter contained less than half of them. True: left out, also of preempted requests, as with vLLM's
    ``offload_prompt_only``. False: treated like other KV. Default: the system's, else ``auto``."""

    disk_dir: Annotated[str, AfterValidator(_whole)] = ""
    """Directory to which chunks are copied on, and where they are found again after a restart; empty: none."""

    disk_gib: float = Field(default=0.0, ge=0)
    """Most disk space to use, in GiB, for all replicas together."""

    gaps: Literal["fused", "off"] | None = None
    """What happens when a conversation comes back and a part was dropped in front of the part that was kept. ``fused``:
    the missing part is computed in one forward pass with the new prompt, and the beginnings of conversations are
    dropped first. ``off``: everything from the first missing block on is recomputed, as in vLLM. Default: the system's.
    Works without a host tier."""

    admin: Annotated[bool, Flag("--kv-tier-admin")] = False
    """Let administrators list and drop conversations of the KV tier, and see its statistics, under
    ``/vllm-ext/kv-tier`` with the key VLLM_EXT_ADMIN_KEY."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.device_int8_share and self.gib:
            allowed = "not beside kv_tier.gib: what the host keeps gains nothing from records on the device; use one"
            raise ConfigError("device_int8_share", self.device_int8_share, allowed)
        if self.admin and not self.gib:
            raise ConfigError("admin", self.admin, "needs kv_tier.gib: without a tier there is nothing to administer")
        if self.policy == LEADING and self.gaps == OFF:
            allowed = "needs gaps: without them a conversation whose first chunk is gone is lost to vLLM's lookup"
            raise ConfigError("policy", self.policy, allowed)
        if self.gaps == FUSED and self.gib and self.load == BETWEEN:
            allowed = (
                f"must be {IN_STEP} or {AUTO} with gaps: what lies behind one comes within the step that computes it"
            )
            raise ConfigError("load", self.load, allowed)
        if self.policy in ("lru", "arc") and (self.ttl_s or self.salt_share < 1):
            name = "ttl_s" if self.ttl_s else "salt_share"
            allowed = f"needs policy {RETENTION}, {TAIL} or {LEADING}: {self.policy} knows no conversations"
            raise ConfigError(name, getattr(self, name), allowed)
        if bool(self.disk_gib) != bool(self.disk_dir):
            allowed = "must be a number of GiB greater than 0 if there is a disk_dir, else 0"
            raise ConfigError("disk_gib", self.disk_gib, allowed)
        if self.disk_dir and not self.gib:
            raise ConfigError("disk_dir", self.disk_dir, "needs kv_tier.gib, through which all KV goes")
        return self

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that were asked for; 0 where that is left open, or ``auto``."""
        return 0 if self.gib in (None, AUTO) else int(float(self.gib) * 2**30)

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk."""
        return int(self.disk_gib * 2**30)

    def resolved(self, wanted: Mapping[str, Any]) -> KvTierConfig:
        """Return these options with all that is left open as the system wants it, or else as it is by default.

        Args:
            wanted: Of ``gib``, ``bits``, ``policy``, ``returns``, ``store``, ``load``, ``copies``, ``gaps`` and
                ``prompt_only``, those that the system cares for.

        Raises:
            ConfigError: what comes out does not fit together.
        """
        # Only what was stored is found on disk after a restart, and what the device holds goes with the server.
        defaults = {**_DEFAULTS, "store": EARLY} if self.disk_dir else _DEFAULTS
        if self.device_int8_share:  # beside which there is no host memory
            wanted = {**wanted, "gib": 0.0}
        return self.changed(**{n: wanted.get(n, defaults[n]) for n in defaults if getattr(self, n) is None})
