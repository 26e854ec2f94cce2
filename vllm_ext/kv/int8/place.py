"""The place of preempted KV that is nearest: on the device, in 8 bits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_ext.contract import RequestView, Victim
    from vllm_ext.kv.int8.prices import RecordPrices
    from vllm_ext.kv.int8.records import Records


class DevicePlace:
    """What preemptions cost where KV may stay in records.

    Args:
        records: There are so many, and so many are free.
        prices: Of moves and reads.
    """

    def __init__(self, records: Records, prices: RecordPrices) -> None:
        self.records, self.prices = records, prices

    def stay_s(self, view: RequestView) -> float:
        """Return the time that it costs a running request, and all others, if its KV stays in records from now on.

        Infinite without records for all of it: then what was there first would be lost.
        """
        num_tokens = view.num_computed_tokens
        if not num_tokens or self.prices.num_blocks(num_tokens) > self.records.num_free:
            return math.inf
        num_steps = max(1.0, view.predicted_remaining_s / max(view.step_stats.step_s, 1e-9))
        return self.prices.stay_s(num_tokens, num_steps)

    def priced(self, victim: Victim) -> Victim:
        """Return what a preemption costs, if its KV stays here where that is cheaper; moves hold everybody up."""
        stay_s = self.stay_s(victim.request)
        return victim._replace(restore_s=stay_s, stall_s=stay_s) if stay_s < victim.restore_s else victim
