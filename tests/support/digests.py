"""Fingerprints of what the systems decide on one trace, to compare between processes."""

from __future__ import annotations

import hashlib
import itertools

from tests.support.conformance_rig import Arrival, Rig, RigConfig
from tests.support.systems_matrix import SYSTEMS
from tests.support.traces import Event, play


def fixed_trace() -> list[Event]:
    """A trace with pressure, aging, aborts and a reset that needs no random source."""
    events = []
    for i in range(24):
        arrival = Arrival(
            prompt_len=1 + 37 * i % 110,
            shared_len=(0, 33, 16)[i % 3],
            family=i % 2,
            max_tokens=40,
            true_len=1 + 13 * i % 37,
            osl=(None, 5, 30)[i % 3],
        )
        events += [Event("arrive", (arrival,)), *[Event("step")] * (i % 4)]
        if i % 7 == 6:
            events += [Event("abort", (i - 3, i % 2 == 0)), Event("advance", (1.5,))]
        if i == 15:
            events.append(Event("reset_prefix_cache"))
    return events


def digests() -> str:
    """Fingerprints of the decisions of every row on the fixed trace, sync and async."""
    lines = []
    for row, depth in itertools.product(SYSTEMS, (1, 2)):
        log = play(Rig(row, RigConfig(depth=depth, num_blocks=18)), fixed_trace()).loop.decision_log()
        lines.append(f"{row} depth {depth}: {hashlib.sha256(log).hexdigest()}")
    return "\n".join(lines)
