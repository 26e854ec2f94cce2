"""How full memory was, and would become, while requests waited: what Past-Future's Table 1 reports.

The policies never see these numbers: they are made of true output lengths.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vllm_ext.systems.past_future import Peak

FUTURE_EVERY = 10
"""Steps between two looks at the future; Past-Future's own analysis admits, and looks, every tenth step."""


class Backlog:
    """Means over the steps after which somebody still waits.

    Before the queue builds up and after it is empty, a scheduler has nothing to decide, and a run of any length has
    such steps at its end.

    Args:
        num_tokens: KV tokens of the whole pool.
        block_size: Tokens of a block.
    """

    def __init__(self, num_tokens: int, block_size: int) -> None:
        self._num_tokens = num_tokens
        self._rounding = (block_size - 1) / 2
        self._used = self._future = 0.0
        self._steps = self._looks = self._decode_tokens = 0

    def step(self, used_fraction: float, decode_tokens: int, running: Iterable[tuple[int, int]]) -> None:
        """Take a step that was scheduled and left somebody waiting.

        Args:
            used_fraction: Share of the pool that is held.
            decode_tokens: Tokens that the step generates.
            running: Per running request: tokens of its sequence so far, and tokens it will truly still generate.
        """
        if self._steps % FUTURE_EVERY == 0:
            pairs = np.array([(held, max(left, 1)) for held, left in running], dtype=np.float64).reshape(-1, 2)
            self._future += Peak(pairs[:, 0], pairs[:, 1], rounding=self._rounding).tokens / self._num_tokens
            self._looks += 1
        self._steps += 1
        self._used += used_fraction
        self._decode_tokens += decode_tokens

    def counters(self) -> dict[str, float]:
        """Return ``backlog_steps``, the tokens they generated, and shares of the pool: held, and needed at the peak.

        That peak is what the running requests need in order to end if nobody joins them (equations 2-4 with true
        lengths); above 1, some of them will be preempted.
        """
        found = {"backlog_steps": float(self._steps), "backlog_decode_tokens": float(self._decode_tokens)}
        if self._steps:
            found["backlog_kv_used_fraction"] = self._used / self._steps
            found["backlog_future_kv_fraction"] = self._future / self._looks
        return found
