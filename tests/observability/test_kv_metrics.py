"""The Prometheus feed of the KV tier: totals become increments, all reasons begin at 0, no tier has no metrics."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from prometheus_client import REGISTRY

from vllm_ext.kv.tally import REASONS
from vllm_ext.observability.metrics import EngineFeed

_numbers = itertools.count()

TIER: dict[str, Any] = {
    "bits": 8,
    "store": "ahead",
    "chunk_tokens": 64,
    "chunk_bytes": 1000,
    "num_workers": 1,
    "host": {
        "capacity_chunks": 10,
        "capacity_bytes": 10_000,
        "used_chunks": 4,
        "used_bytes": 4000,
        "writing_chunks": 1,
        "reading_chunks": 2,
        "pinned_chunks": 3,
    },
    "disk": None,
    "idle_device_blocks": 7,
    "placed_chunks": 9,
    "stored_chunks": 8,
    "loaded_chunks": 5,
    "refused_chunks": 6,
    "unsaved_chunks": 2,
    "gone_chunks": dict.fromkeys(REASONS, 0) | {"room": 5},
    "copied_bytes": {"store": 8000, "load": 5000},
    "copy_jobs": {"store": 3, "load": 2},
    "copy_s": {"store": 2.0, "load": 1.0},
    "exposed_s": {"store": 0.5, "load": 0.25},
    "quantise_s": {"store": 1.5, "load": 0.75},
    "bytes_per_s": {"store": 4e9, "load": 5e9},
    "conversations": {"running": 1, "kept": 2, "gone": 3, "pinned": 1, "expired": 4, "dropped": 5},
}


def state(tier: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    """Return a scheduler's state, as far as the feed reads it."""
    found: dict[str, Any] = {
        "refusals": {},
        **dict.fromkeys(("fallbacks", "stalls", "demotions", "late_predictions", "bad_hints"), 0),
        **dict.fromkeys(("policy_s", "policy_steps", "steps", "lost_records", "oldest_wait_s"), 0),
        **dict.fromkeys(("waits_compared", "wait_expected_s", "wait_actual_s", "wait_error_s"), 0),
        "system": "alise",
        "policies": "alise: x",
        "waiting_by_level": {},
        "runtime": {"mean_abs_relative_error": 0.0},
        "preemptions": {},
        "fates": {},
        "records": [],
        **changes,
    }
    return found if tier is None else {**found, "kv_tier": tier}


class Feed:
    def __init__(self) -> None:
        self.model = f"tier-model-{next(_numbers)}"
        self.feed = EngineFeed(self.model, 0)

    def __call__(self, name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(
            f"vllm_ext:kv_tier_{name}", {"model_name": self.model, "engine": "0", **labels}
        )


def test_sizes_follow_the_state() -> None:
    read = Feed()
    read.feed.update(state(TIER))
    assert (read("capacity_bytes", tier="host"), read("used_bytes", tier="host")) == (10_000, 4000)
    assert read("capacity_bytes", tier="disk") is None, "there is none"
    names = ("capacity_chunks", "used_chunks", "writing_chunks", "reading_chunks", "pinned_chunks")
    assert [read(name) for name in names] == [10, 4, 1, 2, 3]
    assert [read("conversations", state=name) for name in ("running", "kept", "gone")] == [1, 2, 3]
    assert (read("pinned_conversations"), read("idle_device_blocks")) == (1, 7)
    assert read("copy_bytes_per_second", direction="load") == 5e9
    read.feed.update(state({**TIER, "disk": {"used_chunks": 3, "used_bytes": 300, "capacity_bytes": 900}}))
    assert (read("capacity_bytes", tier="disk"), read("used_bytes", tier="disk")) == (900, 300)


def test_totals_become_increments() -> None:
    read = Feed()
    later = copy.deepcopy(TIER)
    later.update(stored_chunks=18, loaded_chunks=15, refused_chunks=16, unsaved_chunks=3)
    later["gone_chunks"].update(room=7, dropped=2)
    later["exposed_s"].update(store=1.0)
    later["conversations"].update(expired=9)
    for tier in (TIER, TIER, later):
        read.feed.update(state(tier))
        assert read("stored_chunks_total") == tier["stored_chunks"]
        assert read("loaded_chunks_total") == tier["loaded_chunks"]
        assert read("refused_chunks_total") == tier["refused_chunks"]
        assert read("unsaved_chunks_total") == tier["unsaved_chunks"]
        assert {reason: read("gone_chunks_total", reason=reason) for reason in REASONS} == tier["gone_chunks"]
        for direction in ("store", "load"):
            assert read("copy_seconds_total", direction=direction) == tier["copy_s"][direction]
            assert read("exposed_seconds_total", direction=direction) == tier["exposed_s"][direction]
            assert read("quantise_seconds_total", direction=direction) == tier["quantise_s"][direction]
        for name in ("expired", "dropped"):
            assert read(f"{name}_conversations_total") == tier["conversations"][name]


def test_what_becomes_of_preempted_requests_begins_at_zero() -> None:
    read = Feed()
    read.feed.update(state(TIER))
    assert [read("preemptions_total", fate=fate) for fate in ("keep", "swap", "recompute")] == [0, 0, 0]
    waits = {"waits_compared": 2, "wait_expected_s": 3.0, "wait_actual_s": 5.0, "wait_error_s": 2.5}
    read.feed.update(state(TIER, fates={"swap": 3}, **waits))
    assert read("preemptions_total", fate="swap") == 3
    assert read("waits_total") == 2
    assert [read(f"wait_{name}_seconds_total") for name in ("expected", "actual", "error")] == [3.0, 5.0, 2.5]


@pytest.mark.parametrize("name", ["stored_chunks_total", "waits_total", "used_chunks"])
def test_without_a_tier_there_are_no_such_metrics(name: str) -> None:
    read = Feed()
    read.feed.update(state(None, fates={"keep": 3}, waits_compared=4))
    assert read(name) is None
