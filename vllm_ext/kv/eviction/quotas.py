"""How many chunks each ``cache_salt`` has, and which of them go first where it has its share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm.v1.kv_offload.base import OffloadKey

from vllm_ext.kv.eviction.tails import Tails


@dataclass(slots=True)
class Salt:
    """What is known of a salt while chunks of it are there."""

    ends: Tails
    """Of its chunks; empty where there are no quotas."""
    chunks: int = 0
    is_new: bool = True
    """Until it comes again. New salts have one quota together where others need the room: else a client that sends a
    new salt with each request would have a quota for each."""


class SaltQuotas:
    """Counts of chunks by salt, and their ends by age. A salt of which no chunk is there leaves nothing behind.

    Args:
        used_s: When a chunk was used last; None if it is no tail.
        salt_tag: Tag of the salt of a chunk that is there.

    Attributes:
        most: Most chunks of one salt, and of all new ones; None: no bound, and no ends are kept.
        salts: By tag.
        of_new: Chunks of new salts.
        ends_of_new: Of the chunks of new salts.
    """

    def __init__(self, used_s: Callable[[OffloadKey], float | None], salt_tag: Callable[[OffloadKey], str]) -> None:
        self.most: int | None = None
        self.salts: dict[str, Salt] = {}
        self.of_new = 0
        self._used_s = used_s
        self._salt_tag = salt_tag
        self.ends_of_new = Tails(self._used_s_if_new)

    def comes(self, salt_tag: str) -> None:
        """Note that a request of a salt came."""
        salt = self.salts.get(salt_tag)
        if salt is not None and salt.is_new:
            salt.is_new = False
            self.of_new -= salt.chunks

    def add(self, salt_tag: str, chunks: int) -> None:
        """Count chunks more, or fewer."""
        if (salt := self.salts.get(salt_tag)) is None:
            salt = self.salts[salt_tag] = Salt(Tails(self._used_s))
        salt.chunks += chunks
        self.of_new += chunks if salt.is_new else 0
        if not salt.chunks:
            del self.salts[salt_tag]

    def over(self, salt_tag: str, chunks: int) -> int:
        """Return by how many chunks a salt would exceed its quota with so many more."""
        salt = self.salts.get(salt_tag)
        return self._over(chunks + (0 if salt is None else salt.chunks))

    def new_over(self, salt_tag: str, chunks: int) -> int:
        """Return by how many chunks the new salts would exceed theirs with so many more of a salt, if that is new."""
        return self._over(self.of_new + chunks) if self._is_new(salt_tag) else 0

    def push(self, salt_tag: str, key: OffloadKey, end: int) -> None:
        """Add a chunk, up to whose end there are so many tokens, if it is a tail now."""
        if self.most is not None:
            salt = self.salts[salt_tag]
            salt.ends.push(0, key, end, salt.chunks)
            self.ends_of_new.push(0, key, end, self.of_new)

    def ends(self, salt_tag: str) -> Tails | None:
        """Return the ends of a salt; None if it has none."""
        salt = self.salts.get(salt_tag)
        return None if salt is None else salt.ends

    def _over(self, chunks: int) -> int:
        return 0 if self.most is None else max(0, chunks - self.most)

    def _is_new(self, salt_tag: str) -> bool:
        salt = self.salts.get(salt_tag)
        return salt is None or salt.is_new

    def _used_s_if_new(self, key: OffloadKey) -> float | None:
        used_s = self._used_s(key)
        return used_s if used_s is not None and self._is_new(self._salt_tag(key)) else None
