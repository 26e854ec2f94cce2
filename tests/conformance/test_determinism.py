"""Invariant 9: the same events give the same bytes, whatever the wall clock and the hash seed say."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given

from .rig import Arrival, Rig, RigConfig
from .systems_matrix import SYSTEMS, Row
from .traces import Event, configs, play, searched, traces

_CLOCKS = ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns")


@pytest.mark.parametrize("row", SYSTEMS, ids=str)
def test_invariant_9_same_events_same_decisions_under_a_mad_wall_clock(row: Row) -> None:
    @searched(row)
    @given(config=configs(2), trace=traces())
    def check(config: RigConfig, trace: Sequence[Event]) -> None:
        once = play(Rig(row, config), trace).loop.decision_log()
        with pytest.MonkeyPatch.context() as patch:
            # Leaps forth and back by hours: whoever reads it decides otherwise.
            leaps = itertools.cycle([0.0, 1e5, -3e4, 7e5, 12.0])
            for name in _CLOCKS:
                real, unit = getattr(time, name), 10**9 if name.endswith("_ns") else 1
                patch.setattr(time, name, lambda real=real, unit=unit: real() + type(real())(next(leaps) * unit))
            again = play(Rig(row, config), trace).loop.decision_log()
        assert once == again

    check()


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


@pytest.mark.timeout(180)
def test_invariant_9_decisions_do_not_depend_on_the_hash_seed() -> None:
    """Sets of request ids iterate in an order that changes with the process; decisions must not follow it."""
    found = []
    for seed in ("1", "2"):
        script = Path(__file__).with_name("print_digests.py")
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(done.stdout.strip())
    assert found[0] == found[1]
