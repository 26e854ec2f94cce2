"""What became of the chunks of the host tier, counted where it happens."""

from __future__ import annotations

from dataclasses import dataclass, field

ROOM, QUOTA, EXPIRED, DROPPED = "room", "quota", "expired", "dropped"
UNWRITTEN, UNREADABLE, RESET = "unwritten", "unreadable", "reset"
REASONS = {
    ROOM: "evicted to make room for others",
    QUOTA: "evicted since their cache_salt had its share",
    EXPIRED: "their conversation was not used for kv_ttl_s",
    DROPPED: "their conversation was dropped by hand",
    UNWRITTEN: "their copy failed, or held values that 8 bits can't keep",
    UNREADABLE: "their copy could not be read",
    RESET: "the tier was emptied",
}
"""Why a chunk is no longer in the tier."""


@dataclass
class ChunkTally:
    """Running totals of chunks, since the engine started.

    Invariant: ``placed`` = chunks in the tier + all of ``gone``.
    """

    placed: int = 0
    """Got a place, to be written from the device, or from disk."""
    stored: int = 0
    """Were written, and can be found."""
    loaded: int = 0
    """Were to be read for a request; one that is read several times counts as often."""
    refused: int = 0
    """Were to be stored, and were not: all places were in use, or beyond the quota of their ``cache_salt``."""
    gone: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    """By reason: left the tier."""
