"""How many chunks each ``cache_salt`` has, and which of them go first where it has its share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from vllm_ext.kv.eviction.tails import Tails

_Key = TypeVar("_Key")


class SaltQuotas(Generic[_Key]):
    """Counts of chunks by salt, and their ends by age. A salt of which no chunk is there leaves nothing behind.

    A salt is new until it comes again while chunks of it are there. New salts have one quota together where others
    need the room: else a client that sends a new salt with each request would have a quota for each.

    Args:
        used_s: When a key was used last; None if it is no tail.
        salt_tag: Tag of the salt of a key that is one.

    Attributes:
        most: Most chunks of one salt, and of all new ones; None: no bound, and no ends are kept.
        per_salt: Chunks by tag of their salt.
        of_new: Chunks of new salts.
        ends_of_new: Of the chunks of new salts.
    """

    def __init__(self, used_s: Callable[[_Key], float | None], salt_tag: Callable[[_Key], str]) -> None:
        self.most: int | None = None
        self.per_salt: Counter[str] = Counter()
        self.of_new = 0
        self._used_s = used_s
        self._salt_tag = salt_tag
        self._returned: set[str] = set()
        self._ends: dict[str, Tails[int, _Key]] = {}
        self.ends_of_new: Tails[int, _Key] = Tails(self._used_s_if_new)

    def comes(self, salt_tag: str) -> None:
        """Note that a request of a salt came."""
        if salt_tag in self.per_salt and salt_tag not in self._returned:
            self._returned.add(salt_tag)
            self.of_new -= self.per_salt[salt_tag]

    def add(self, salt_tag: str, chunks: int) -> None:
        """Count chunks more, or fewer."""
        self.per_salt[salt_tag] += chunks
        if salt_tag not in self._returned:
            self.of_new += chunks
        if not self.per_salt[salt_tag]:
            del self.per_salt[salt_tag]
            self._returned.discard(salt_tag)
            self._ends.pop(salt_tag, None)

    def over(self, salt_tag: str, chunks: int) -> int:
        """Return by how many chunks a salt would exceed its quota with so many more."""
        return 0 if self.most is None else max(0, self.per_salt[salt_tag] + chunks - self.most)

    def new_over(self, salt_tag: str, chunks: int) -> int:
        """Return by how many chunks the new salts would exceed theirs with so many more of a salt, if that is new."""
        if self.most is None or salt_tag in self._returned:
            return 0
        return max(0, self.of_new + chunks - self.most)

    def push(self, salt_tag: str, key: _Key) -> None:
        """Add a key that is an end now."""
        if self.most is None:
            return
        self._ends.setdefault(salt_tag, Tails(self._used_s)).push(0, key, self.per_salt[salt_tag])
        if salt_tag not in self._returned:
            self.ends_of_new.push(0, key, self.of_new)

    def ends(self, salt_tag: str) -> Tails[int, _Key] | None:
        """Return the ends of a salt; None if it has none."""
        return self._ends.get(salt_tag)

    def clear(self) -> None:
        """Forget the ends of what is there no more."""
        self.ends_of_new.clear()

    def _used_s_if_new(self, key: _Key) -> float | None:
        used_s = self._used_s(key)
        return None if used_s is None or self._salt_tag(key) in self._returned else used_s
