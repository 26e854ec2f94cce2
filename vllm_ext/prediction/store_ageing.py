"""Which entry of a vector store goes when there are too many: the rules, and the order of age they go by."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Ageing:
    """Which entry goes when there are too many.

    1. Of one vector and model at most `max_copies` are kept: a further one replaces the oldest copy, whether the store
       is full or not. A prompt that is sent a hundred thousand times neither fills the store nor slows the search.
    2. Into a full store, an entry replaces the most similar of its 8 nearest entries that it makes redundant: same
       model, similarity of at least `redundant_similarity`, lengths not further apart than `like_length`.
    3. If it makes none redundant, it replaces the entry that was inserted first.
    """

    max_copies: int = 32
    redundant_similarity: float = 0.98
    like_length: float = 0.1
    """Difference of two lengths as a share of the longer one."""

    def __post_init__(self) -> None:
        if self.max_copies < 1:
            raise ValueError(f"max_copies={self.max_copies!r}: must be at least 1")
        if not self.redundant_similarity >= 0:
            raise ValueError(
                f"redundant_similarity={self.redundant_similarity!r}: must be at least 0; above 1 is never"
            )
        if not 0 <= self.like_length <= 1:
            raise ValueError(f"like_length={self.like_length!r}: must be within 0..1")

    def alike(self, one: int, other: int) -> bool:
        """Whether two lengths in tokens say the same."""
        return abs(one - other) <= self.like_length * max(one, other)


class AgeOrder:
    """The taken slots from the oldest entry to the newest, and which of them are copies: equal in vector and model.

    No lock: only the store's writer uses it.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[int, bytes] = OrderedDict()  # slot -> what its copies have in common, oldest first
        self._copies: dict[bytes, tuple[int, ...]] = {}  # key -> slots, oldest first

    @property
    def oldest(self) -> int:
        """Slot of the oldest entry; there must be one."""
        return next(iter(self._keys))

    def copies(self, key: bytes) -> tuple[int, ...]:
        """Slots of the entries with that key, oldest first."""
        return self._copies.get(key, ())

    def put(self, slot: int, key: bytes) -> None:
        """Note that a slot was written: its entry is the newest, and one that was there is gone."""
        old = self._keys.pop(slot, None)
        if old is not None:
            if remaining := tuple(copy for copy in self._copies[old] if copy != slot):
                self._copies[old] = remaining
            else:
                del self._copies[old]
        self._keys[slot] = key
        self._copies[key] = (*self.copies(key), slot)

    def arrange(self, slots: Iterable[int]) -> None:
        """Take over another order of all taken slots, oldest first."""
        keys, self._keys, self._copies = self._keys, OrderedDict(), {}
        for slot in slots:
            self.put(slot, keys[slot])
