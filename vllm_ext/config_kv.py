"""Options of the host tier for KV."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_ext.config_checks import ConfigError, boolean, choice, number

LOSSLESS, QUANTISED = 16, 8
RETENTION, TAIL, LEADING = "retention", "tail", "leading"
PREFIX_POLICIES = (RETENTION, TAIL, "lru", "arc")
"""Those that leave what vLLM's lookup from the front finds."""
POLICIES = (*PREFIX_POLICIES, LEADING)
AUTO = "auto"
EARLY, LATE, AHEAD = "early", "late", "ahead"
STORES = (EARLY, LATE, AHEAD)
BETWEEN, IN_STEP = "between", "in-step"
LOADS = (BETWEEN, IN_STEP, AUTO)
FUSED, PHASED, OFF = "fused", "phased", "off"
GAPS = (FUSED, PHASED, OFF)
LEARNED, BY_TURNS, BY_AGE = "learned", "turns", "age"
RETURNS = (LEARNED, BY_TURNS, BY_AGE)
PAYING, ALL = "paying", "all"
COPIES = (PAYING, ALL)
_CHOICES = {
    "policy": POLICIES,
    "returns": RETURNS,
    "store": (AUTO, *STORES),
    "load": LOADS,
    "copies": COPIES,
    "gaps": GAPS,
}
_DEFAULTS = {
    "bits": LOSSLESS,
    "policy": RETENTION,
    "returns": LEARNED,
    "store": AUTO,
    "load": BETWEEN,
    "copies": PAYING,
    "gaps": OFF,
}
"""Of the options that are a system's to choose where the user does not."""


@dataclass(frozen=True, kw_only=True)
class KvTierConfig:
    """KV blocks in host memory: how much, in which form, and which of them go first."""

    gib: float = 0.0
    """Host memory for KV, in GiB, of all workers of an engine together; 0 leaves the tier out."""

    bits: int | None = None
    """16 keeps KV as it is, whatever its type; 8 quantises it: half the bytes, outputs that may differ. By default what
    the system wants: 8 for ``alise``, else 16."""

    policy: str | None = None
    """Which chunks are evicted first: ends of conversations of least ``retention`` value, or those that were not used
    longest (``tail``); any chunk of least retention value, which is a ``leading`` end, where ``gaps`` are computed; or
    by ``lru`` or ``arc``, vLLM's own, which know no conversations. By default what the system wants, else
    ``retention``."""

    returns: str | None = None
    """At which rate conversations are taken to come back, in the retention value: ``learned``, by turns so far and time
    since the last one; ``turns``, the share that comes back after so many turns, learned too, over the time since; or
    ``age``, 1 / time for all alike. By default what the system wants, else ``learned``."""

    ttl_s: float = 0.0
    """Seconds after its last use at which a conversation is dropped; 0: never. A client's ``kv_ttl_s`` may shorten it
    for its own conversation."""

    pin_share: float = 0.25
    """Most of the tier that an administrator may pin; 0: nothing."""

    salt_share: float = 1.0
    """Most of the tier that the chunks of one ``cache_salt`` may hold; of a full tier also those of all salts together
    that were seen in one request only."""

    store: str | None = None
    """When a chunk is copied: ``early``, as soon as it is full; ``late``, when its request is preempted or ends;
    ``ahead``, when its request has left and the device runs short of blocks that can be taken without loss; or
    ``auto``: ``ahead`` where that can be done, else ``early``. By default what the system wants, else ``auto``, and
    with a disk ``early``."""

    free_fraction: float = 0.25
    """Share of the device's blocks that ``ahead`` keeps free, or copied."""

    load: str | None = None
    """When KV is brought back: ``between`` steps, while others compute and the request waits; ``in-step``, layer by
    layer in the step that computes the request, for which all in that step wait; or ``auto``, what costs less. By
    default what the system wants, else ``between``."""

    copies: str | None = None
    """Which copies are made: ``paying``, a store that a step waits for only where it is expected to save more time than
    it takes, and behind a gap a load only where computing the block again takes longer; or ``all``: whatever is about
    to be overwritten is stored, and whatever is held is loaded. By default what the system wants, else ``paying``."""

    device_int8_share: float = 0.0
    """Share of the device's KV memory in which KV stays in 8 bits, instead of being dropped, when its blocks are given
    to others: what is evicted there, and what preempted requests leave. Almost twice as many tokens fit into it, and
    attention reads them where they are. Needs no host tier; 0: none."""

    prompt_only: bool = False
    """Leave out the KV of generated tokens, which the next turn of a conversation brings back as its prompt."""

    disk_dir: str = ""
    """Directory to which chunks are copied on, and where they are found after a restart; empty: none."""

    disk_gib: float = 0.0
    """Most that lies there, in GiB, of all replicas together."""

    gaps: str | None = None
    """What is done about a conversation that comes back and of which a part was dropped in front of what was kept:
    ``fused`` computes that part in one forward pass with the new prompt, and drops leading ends first; ``phased``
    computes it in steps of its own before, which any worker can; ``off`` computes all from the first missing block on,
    as vLLM does. By default what the system wants. Needs no host tier."""

    admin: bool = False
    """Whether a server answers under ``/vllm-ext/kv-tier`` to whoever has the key in ``VLLM_EXT_ADMIN_KEY``:
    statistics; conversations listed, pinned, dropped."""

    def __post_init__(self) -> None:
        number("kv_tier.gib", self.gib)
        if self.gib < 0:
            raise ConfigError("kv_tier.gib", self.gib, "must be 0 (no tier) or a number of GiB")
        if self.bits is not None and (isinstance(self.bits, bool) or self.bits not in (LOSSLESS, QUANTISED)):
            raise ConfigError("kv_tier.bits", self.bits, "must be 16 or 8")
        for name, known in _CHOICES.items():
            if getattr(self, name) is not None:
                choice(f"kv_tier.{name}", getattr(self, name), known)
        number("kv_tier.free_fraction", self.free_fraction)
        if not 0 < self.free_fraction < 1:
            raise ConfigError("kv_tier.free_fraction", self.free_fraction, "must be a fraction between 0 and 1")
        number("kv_tier.device_int8_share", self.device_int8_share)
        if not 0 <= self.device_int8_share < 1:
            allowed = "must be 0 (none), or a fraction less than 1"
            raise ConfigError("kv_tier.device_int8_share", self.device_int8_share, allowed)
        boolean("kv_tier.prompt_only", self.prompt_only)
        boolean("kv_tier.admin", self.admin)
        if self.admin and not self.gib:
            raise ConfigError("kv_tier.admin", self.admin, "needs kv_tier.gib: without a tier there is nothing to see")
        if self.policy == LEADING and self.gaps == OFF:
            allowed = "needs gaps: without them a conversation whose first chunk is gone is lost to vLLM's lookup"
            raise ConfigError("kv_tier.policy", self.policy, allowed)
        if self.gaps in (FUSED, PHASED) and self.gib and self.load == BETWEEN:
            allowed = (
                f"must be {IN_STEP} or {AUTO} with gaps: what lies behind one comes within the step that computes it"
            )
            raise ConfigError("kv_tier.load", self.load, allowed)
        self._check_conversations()
        self._check_disk()

    def _check_conversations(self) -> None:
        for name in ("ttl_s", "pin_share", "salt_share"):
            number(f"kv_tier.{name}", getattr(self, name))
        if self.ttl_s < 0:
            raise ConfigError("kv_tier.ttl_s", self.ttl_s, "must be 0 (never) or a number of seconds")
        if not 0 <= self.pin_share <= 0.9:
            raise ConfigError("kv_tier.pin_share", self.pin_share, "must be a fraction from 0 to 0.9")
        if not 0 < self.salt_share <= 1:
            raise ConfigError("kv_tier.salt_share", self.salt_share, "must be a fraction greater than 0 and at most 1")
        if self.policy in ("lru", "arc") and (self.ttl_s or self.salt_share < 1):
            name = "ttl_s" if self.ttl_s else "salt_share"
            allowed = f"needs policy {RETENTION}, {TAIL} or {LEADING}: {self.policy} knows no conversations"
            raise ConfigError(f"kv_tier.{name}", getattr(self, name), allowed)

    def _check_disk(self) -> None:
        """Check the options of the disk among themselves; whether it can be written is seen when a server starts."""
        if not isinstance(self.disk_dir, str):
            raise ConfigError("kv_tier.disk_dir", self.disk_dir, "must be the path of a directory, or empty")
        number("kv_tier.disk_gib", self.disk_gib)
        if self.disk_gib < 0 or bool(self.disk_gib) != bool(self.disk_dir):
            allowed = "must be a number of GiB greater than 0 if there is a disk_dir, else 0"
            raise ConfigError("kv_tier.disk_gib", self.disk_gib, allowed)
        if self.disk_dir:
            if not self.gib:
                raise ConfigError("kv_tier.disk_dir", self.disk_dir, "needs kv_tier.gib, through which all KV goes")
            object.__setattr__(self, "disk_dir", os.path.abspath(os.path.expanduser(self.disk_dir)))

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        return int(self.gib * 2**30)

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk."""
        return int(self.disk_gib * 2**30)

    def resolved(self, wanted: Mapping[str, Any]) -> KvTierConfig:
        """Return these options with all that is left open as the system wants it, or else as it is by default.

        Args:
            wanted: Of ``bits``, ``policy``, ``returns``, ``store``, ``load``, ``copies`` and ``gaps``, those that the
                system cares for.

        Raises:
            ConfigError: what comes out does not fit together.
        """
        # Only what was stored is found on disk after a restart, and what the device holds goes with the server.
        defaults = {**_DEFAULTS, "store": EARLY} if self.disk_dir else _DEFAULTS
        return replace(self, **{n: wanted.get(n, defaults[n]) for n in defaults if getattr(self, n) is None})
