"""What a block of KV looks like in 8 bits.

A record is one of vLLM's blocks of one layer. Each channel (K or V, head and channel of the head) is quantised on its
own over the tokens of the block, after rotary embedding, as it lies in the cache. In fp32, no operation fused:

    scale   = (maximum - minimum) / 255          rounded up to the type of the KV, at least `LEAST_SCALE`; or 0
    inverse = 1 / scale                          or 0
    code    = round((x - minimum) * inverse)     0 to 255, halves to even
    x'      = minimum + code * scale             rounded to the type of the KV

``minimum`` and ``scale`` are kept in the type of the KV. A minimum is one of the values, so it is exact; a scale of 0
says that all values are equal, and then they come back exactly. An error is at most half a scale, and the rounding of
the result; in bfloat16 a scale is less than 1 % wider than it had to be. A zero may lose its sign. A block with a value
that is not finite, or a channel whose ``minimum + 255 * scale`` the type can't hold, has no record.

Source: ALISE, equation 8 (channel-wise, asymmetric). Its zero point is an integer; a minimum needs none and serves
channels far from zero as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

LEVELS = 255
LEAST_SCALE = 2.0**-126
"""The least normal number of fp32: the inverse of anything less might be infinite."""
ROUNDER = 1.5 * 2**23
"""Added to a number below 2**22, it leaves the nearest integer, halves to even, in the lowest bits."""
ITEM_BYTES = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 4}
"""Types of KV that can be quantised."""
_ALIGNMENT = 64


@dataclass(frozen=True)
class Side:
    """Where K, or V, of a head lies in a page: element ``offset + token * token_stride + channel * channel_stride``."""

    offset: int
    token_stride: int
    channel_stride: int


@dataclass(frozen=True, kw_only=True)
class PageLayout:
    """Where each value of a block lies in its page, for one layer.

    Raises:
        ValueError: the strides do not name every element of the page exactly once, a type that can't be quantised, or
            neither tokens nor channels are next to each other.
    """

    dtype: torch.dtype
    num_heads: int
    head_dim: int
    block_size: int
    head_stride: int
    k: Side
    v: Side
    _index: npt.NDArray[np.int64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype={self.dtype}: must be one of {', '.join(map(str, ITEM_BYTES))}")
        heads, tokens, channels = (np.arange(n) for n in (self.num_heads, self.block_size, self.head_dim))
        sides = [
            side.offset
            + heads[:, None, None] * self.head_stride
            + tokens[:, None] * side.token_stride
            + channels * side.channel_stride
            for side in (self.k, self.v)
        ]
        index = np.stack(sides, axis=1).astype(np.int64)
        if not np.array_equal(np.sort(index, axis=None), np.arange(self.page_elements)):
            raise ValueError(f"{self.k}, {self.v}, head_stride={self.head_stride}: must name each element once")
        for side in (self.k, self.v):
            if 1 not in (side.token_stride, side.channel_stride):
                raise ValueError(f"{side}: tokens or channels must be next to each other")
        object.__setattr__(self, "_index", index)

    @classmethod
    def rows(cls, dtype: torch.dtype, num_heads: int, head_dim: int, block_size: int) -> PageLayout:
        """Pages of shape [heads, tokens, K then V]: vLLM's CUDA backends, in layout LBHNC."""
        width = 2 * head_dim
        return cls(
            dtype=dtype, num_heads=num_heads, head_dim=head_dim, block_size=block_size,
            head_stride=block_size * width, k=Side(0, width, 1), v=Side(head_dim, width, 1),
        )  # fmt: skip

    @classmethod
    def tokens_first(cls, dtype: torch.dtype, num_heads: int, head_dim: int, block_size: int) -> PageLayout:
        """Pages of shape [tokens, heads, K then V]: vLLM's default on CUDA."""
        width = 2 * head_dim
        return cls(
            dtype=dtype, num_heads=num_heads, head_dim=head_dim, block_size=block_size,
            head_stride=width, k=Side(0, num_heads * width, 1), v=Side(head_dim, num_heads * width, 1),
        )  # fmt: skip

    @classmethod
    def transposed_keys(cls, dtype: torch.dtype, num_heads: int, head_dim: int, block_size: int) -> PageLayout:
        """Pages of shape [heads, (K: channels, tokens) then (V: tokens, channels)]: vLLM's CPU backend."""
        side = block_size * head_dim
        return cls(
            dtype=dtype, num_heads=num_heads, head_dim=head_dim, block_size=block_size,
            head_stride=2 * side, k=Side(0, 1, block_size), v=Side(side, head_dim, 1),
        )  # fmt: skip

    @classmethod
    def from_index(cls, dtype: torch.dtype, index: npt.NDArray[np.int64]) -> PageLayout:
        """Return the layout that puts each value where ``index`` says, as a probe of the backend found it.

        Args:
            dtype: Type of the KV.
            index: Element of the page by head, side (K, V), token and channel, shape [H, 2, N, D].

        Raises:
            ValueError: no strides say the same; such a page can only be copied as it is.
        """
        heads, _, tokens, channels = index.shape

        def side(which: int) -> Side:
            first = index[0, which]
            return Side(
                int(first[0, 0]),
                int(first[1, 0] - first[0, 0]) if tokens > 1 else channels,
                int(first[0, 1] - first[0, 0]) if channels > 1 else 1,
            )

        step = int(index[1, 0, 0, 0] - index[0, 0, 0, 0]) if heads > 1 else 2 * tokens * channels
        try:
            found = cls(
                dtype=dtype, num_heads=heads, head_dim=channels, block_size=tokens,
                head_stride=step, k=side(0), v=side(1),
            )  # fmt: skip
        except ValueError:
            found = None
        if found is None or not np.array_equal(found.index, index):
            raise ValueError("index: no strides describe these pages")
        return found

    @property
    def index(self) -> npt.NDArray[np.int64]:
        """Element of the page by head, side (K, V), token and channel, shape [H, 2, N, D]."""
        return self._index

    @property
    def num_channels(self) -> int:
        """Channels of a page: heads, K and V, channels of a head."""
        return 2 * self.num_heads * self.head_dim

    @property
    def page_elements(self) -> int:
        """Values of a page."""
        return self.num_channels * self.block_size

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in the cache."""
        return self.page_elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class RecordFormat:
    """Bytes of one block of one layer: codes in the order of the page, minima, scales.

    Minima and scales are in the order [H, 2, D], each in the type of the KV.
    """

    layout: PageLayout

    @property
    def codes_bytes(self) -> int:
        """Bytes of the codes, one for each value of the page."""
        return self.layout.page_elements

    @cached_property
    def minima_offset(self) -> int:
        """Byte at which the minima begin."""
        item = ITEM_BYTES[self.layout.dtype]
        return -(-self.codes_bytes // item) * item

    @cached_property
    def scales_offset(self) -> int:
        """Byte at which the scales begin, right behind the minima."""
        return self.minima_offset + self.layout.num_channels * ITEM_BYTES[self.layout.dtype]

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of a record, a multiple of 64."""
        end = self.scales_offset + self.layout.num_channels * ITEM_BYTES[self.layout.dtype]
        return -(-end // _ALIGNMENT) * _ALIGNMENT

    @property
    def ratio(self) -> float:
        """Bytes of the block in the cache over bytes of its record."""
        return self.layout.page_bytes / self.record_bytes
