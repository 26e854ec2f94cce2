"""Random traces: lists of events that can be applied to several rigs, so that their decisions can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from vllm.v1.core.sched.interface import PauseState

from tests.support.conformance_rig import MIN_BLOCKS, TOKEN_BUDGET, Arrival, Rig, RigConfig
from tests.support.systems_matrix import Row


@dataclass(frozen=True)
class Event:
    """A method of Rig and its arguments."""

    method: str
    args: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        return f"{self.method}({', '.join(map(repr, self.args))})"


def searched(row: Row) -> settings:
    """How long to search with one row: its share of what the profile asks for."""
    return settings(max_examples=row.examples * max(1, settings.default.max_examples // 40))


def arrivals() -> st.SearchStrategy[Arrival]:
    """Short and long prompts (beyond the step budget), shared prefixes, true and false announcements."""

    def build(
        prompt_len: int,
        shared: int,
        family: int,
        max_tokens: int,
        true_len: int,
        osl: str,
        prio: int,
        ttft: float | None,
    ) -> Arrival:
        announced = {"none": None, "right": true_len, "low": max(1, true_len // 4), "high": true_len * 4}[osl]
        return Arrival(
            prompt_len=prompt_len,
            shared_len=shared,
            family=family,
            max_tokens=max_tokens,
            true_len=true_len,
            osl=announced,
            priority=prio,
            ttft_slo_ms=ttft,
        )

    return st.builds(
        build,
        st.one_of(st.integers(1, 40), st.integers(TOKEN_BUDGET, 120)),
        st.sampled_from([0, 0, 16, 33, 64]),
        st.integers(0, 1),
        st.integers(1, 40),
        st.integers(1, 48),
        st.sampled_from(["none", "right", "low", "high"]),
        st.sampled_from([0, 0, 0, -1, 1]),
        st.sampled_from([None, None, 60.0, 400.0, 5000.0]),
    )


def configs(depth: int | None = None) -> st.SearchStrategy[RigConfig]:
    """Pools small enough for preemption, and some that never fill; without ``depth`` both sync and async engines."""
    return st.builds(
        RigConfig,
        depth=st.sampled_from([1, 2]) if depth is None else st.just(depth),
        caching=st.booleans(),
        num_blocks=st.sampled_from([MIN_BLOCKS, 14, 18, 25, 40]),
        max_num_seqs=st.sampled_from([1, 3, 6, 10]),
        v2_model_runner=st.booleans(),
    )


def _events() -> st.SearchStrategy[list[Event]]:
    arrive = st.builds(lambda a: [Event("arrive", (a,))], arrivals())
    steps = st.integers(1, 8).map(lambda n: [Event("step")] * n)
    abort = st.builds(lambda n, w: [Event("abort", (n, w))], st.integers(0, 30), st.booleans())
    advance = st.sampled_from([0.1, 1.5, 10.0]).map(lambda s: [Event("advance", (s,))])
    reset = st.just([Event("reset_prefix_cache")])
    pause = st.builds(
        lambda state, n: [
            Event("pause", (state,)),
            *[Event("step")] * n,
            Event("pause", (PauseState.UNPAUSED,)),
        ],
        st.sampled_from([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL]),
        st.integers(0, 4),
    )
    # one_of drops repeated strategies, so weights go through an index.
    weighted = [arrive] * 5 + [steps] * 5 + [abort, advance, reset, pause]
    return st.integers(0, len(weighted) - 1).flatmap(weighted.__getitem__)


def traces() -> st.SearchStrategy[list[Event]]:
    """A crowd first, so that most traces meet pressure, then anything."""
    crowd = st.lists(arrivals(), min_size=3, max_size=8).map(lambda xs: [Event("arrive", (x,)) for x in xs])
    rest = st.lists(_events(), min_size=4, max_size=20).map(lambda chunks: [e for chunk in chunks for e in chunk])
    return st.builds(lambda a, b: a + b, crowd, rest)


def play(rig: Rig, trace: Sequence[Event]) -> Rig:
    """Apply a trace, audit after every event, then drain."""
    for event in trace:
        getattr(rig, event.method)(*event.args)
        rig.audit()
    rig.drain(before_step=rig.audit)
    return rig


def with_true_lengths(trace: Sequence[Event], true_lengths: Mapping[int, int]) -> list[Event]:
    """The same trace where some arrivals, by number, have another hidden length; all that a client says stays."""
    changed = []
    count = 0
    for event in trace:
        if event.method == "arrive":
            arrival = event.args[0]
            changed.append(Event("arrive", (replace(arrival, true_len=true_lengths.get(count, arrival.true_len)),)))
            count += 1
        else:
            changed.append(event)
    return changed
