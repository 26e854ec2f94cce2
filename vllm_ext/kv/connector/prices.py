"""What moving KV between device and host memory takes, learned from the copies that were made."""

from __future__ import annotations

_START_BYTES_PER_S = 4e9
"""Taken until a copy was measured: about half of what a PCIe 3 link or one core's memory copy does."""
_MEMORY_BYTES = 2**30
"""Bytes copied after which a measurement counts half."""


class Bandwidth:
    """Bytes per second of one direction; copies count by their bytes, and old ones less."""

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0

    @property
    def known(self) -> bool:
        """Whether a copy was measured."""
        return self._seconds > 0

    @property
    def bytes_per_s(self) -> float:
        """The mean of the copies so far."""
        return self._bytes / self._seconds if self._seconds > 0 else _START_BYTES_PER_S

    def observe(self, num_bytes: float, seconds: float) -> None:
        """Take in copies that moved so many bytes in so many seconds; one without either is passed over."""
        if not (num_bytes > 0 and seconds > 0):
            return
        kept = 0.5 ** (num_bytes / _MEMORY_BYTES)
        self._bytes = self._bytes * kept + num_bytes
        self._seconds = self._seconds * kept + seconds


class TransferPrices:
    """Seconds to copy the KV of so many tokens, out and in.

    Args:
        chunk_bytes: What a chunk moves over the link of one worker; workers copy side by side.
        chunk_tokens: Tokens of a chunk.
        takes_cycles: Whether what computes also copies, as on the CPU: there other copies make way for those that a
            step waits for.
    """

    def __init__(self, chunk_bytes: int, chunk_tokens: int, *, takes_cycles: bool = False) -> None:
        self.chunk_tokens, self.takes_cycles = chunk_tokens, takes_cycles
        self._chunk_bytes = chunk_bytes
        self.out = Bandwidth()
        self.back = Bandwidth()

    def store_s(self, num_tokens: int) -> float:
        """Return the time to copy whole chunks of so many tokens to the host."""
        return self._chunks(num_tokens) * self._chunk_bytes / self.out.bytes_per_s

    def load_s(self, num_tokens: int) -> float:
        """Return the time to copy them back."""
        return self._chunks(num_tokens) * self._chunk_bytes / self.back.bytes_per_s

    def kept_tokens(self, num_tokens: int) -> int:
        """Return how many of a sequence's first tokens whole chunks hold."""
        return self._chunks(num_tokens) * self.chunk_tokens

    def _chunks(self, num_tokens: int) -> int:
        return num_tokens // self.chunk_tokens
