"""The Prometheus feed: totals become increments, levels that vanish read 0, records fill the histograms.

The metrics live in the registry of the process; each test uses a model name of its own, and sees only its own samples.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.v1.metrics import prometheus

from vllm_ext.kv.host.tally import REASONS
from vllm_ext.metrics.engine import EngineFeed

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
    },
    "disk": None,
    "idle_device_blocks": 7,
    "placed_chunks": 9,
    "stored_chunks": 8,
    "loaded_chunks": 5,
    "refused_chunks": 6,
    "unsaved_chunks": 2,
    "low_reuse_salts": 1,
    "generated_chunks": {"contained": 3, "omitted": 4, "left_out": 7},
    "gone_chunks": dict.fromkeys(REASONS, 0) | {"room": 5},
    "copied_bytes": {"store": 8000, "load": 5000},
    "copy_jobs": {"store": 3, "load": 2},
    "copy_s": {"store": 2.0, "load": 1.0},
    "exposed_s": {"store": 0.5, "load": 0.25},
    "quantise_s": {"store": 1.5, "load": 0.75},
    "bytes_per_s": {"store": 4e9, "load": 5e9},
    "conversations": {"running": 1, "kept": 2, "gone": 3, "expired": 4, "dropped": 5},
}


GAPS = {
    "requests": 2,
    "gaps": 3,
    "tokens_kept": 64,
    "tokens_loaded": 32,
    "tokens_computed": 96,
    "tokens_missing": 80,
    "requests_by_gaps": {"1": 1, "2": 1},
    "refused": {"rows": 4},
}


def state(**changes: Any) -> dict[str, Any]:
    """A scheduler's state, as far as the feed reads it."""
    return {
        **dict.fromkeys(("fallbacks", "stalls", "demotions", "late_predictions", "bad_hints", "lost_records"), 0),
        **dict.fromkeys(("policy_s", "policy_steps", "steps", "oldest_wait_s"), 0),
        **dict.fromkeys(("waits_compared", "wait_expected_s", "wait_actual_s", "wait_error_s"), 0),
        "system": "alise",
        "policies": "alise: x",
        "waiting_by_level": {},
        "runtime": {"mean_abs_relative_error": 0.0},
        "sharing": {"clients": 0, "spread": 0.0},
        "load": {"waiting_share": 0.0, "kv_share": 0.0},
        "switch": {"by_arrival": False, "changes": 0},
        "longest_wait_by_level": {},
        "preemptions": {},
        "refusals": {},
        "dispositions": {},
        "records": [],
        **changes,
    }


def record(**changes: Any) -> dict[str, Any]:
    return {
        "queue_s": 0.2,
        "finish_reason": "stop",
        "output_tokens": 10,
        "predicted_tokens": 20,
        "prediction_source": "history",
        "e2e_s": 1.5,
        "sampled": True,
        "cache_salt": None,
        "hash_ids": None,
        "prompt_token_ids": None,
        **changes,
    }


class Feed:
    """Reads what a feed of its own wrote, of the metrics whose names begin so."""

    def __init__(self, prefix: str = "", engine: int = 0, model: str | None = None) -> None:
        self.model = model or f"model-{next(_numbers)}"
        self.prefix, self.engine = f"vllm_ext:{prefix}", str(engine)
        self.feed = EngineFeed(self.model, engine)

    def __call__(self, name: str, **labels: str) -> float | None:
        labels = {"model_name": self.model, "engine": self.engine, **labels}
        return REGISTRY.get_sample_value(self.prefix + name, labels)


def test_totals_become_increments() -> None:
    read = Feed()
    for total, policy in ((3, 1), (3, 1), (10, 4)):
        read.feed.update(
            state(steps=total, demotions=total, policy_s=total / 2, preemptions={"policy": policy, "memory": 0})
        )
        assert read("steps_total") == total
        assert read("demotions_total") == total
        assert read("policy_seconds_total") == total / 2
        assert read("preemptions_total", reason="policy") == policy
        assert read("preemptions_total", reason="memory") == 0


def test_a_reason_that_appears_later_is_counted() -> None:
    read = Feed()
    read.feed.update(state())
    read.feed.update(state(preemptions={"policy": 0, "memory": 0, "reset": 2}))
    assert read("preemptions_total", reason="reset") == 2


def test_totals_that_start_over_count_from_zero_again() -> None:
    """An engine core that was restarted: the 2 that it counted by the next reading are new ones."""
    read = Feed()
    for total in (10, 2, 5):
        read.feed.update(state(steps=total))
    assert read("steps_total") == 10 + 5


def test_levels_that_vanish_read_zero() -> None:
    read = Feed()
    read.feed.update(state(waiting_by_level={"0": 3, "-1": 1}))
    assert (read("num_requests_waiting", level="0"), read("num_requests_waiting", level="-1")) == (3, 1)
    read.feed.update(state(waiting_by_level={"2": 4}))
    assert [read("num_requests_waiting", level=level) for level in ("0", "-1", "2")] == [0, 0, 4]
    read.feed.update(state())
    assert [read("num_requests_waiting", level=level) for level in ("0", "-1", "2")] == [0, 0, 0]


def test_gauges_follow_the_state() -> None:
    read = Feed()
    read.feed.update(state(oldest_wait_s=7.5, runtime={"mean_abs_relative_error": 0.25}))
    assert (read("oldest_wait_seconds"), read("runtime_model_relative_error")) == (7.5, 0.25)
    assert read("system_info", system="alise", policies="alise: x") == 1


def test_records_fill_the_histograms() -> None:
    read = Feed()
    read.feed.update(state(records=[record(), record(finish_reason="length", output_tokens=40, e2e_s=2.0)]))
    read.feed.update(state())
    assert (read("queue_seconds_count"), read("queue_seconds_sum")) == (2, pytest.approx(0.4))
    assert (read("output_tokens_count"), read("output_tokens_sum")) == (2, 50)
    assert read("predicted_output_tokens_sum", source="history") == 40
    assert read("predicted_to_true_ratio_sum", source="history") == 2.5
    assert read("normalized_latency_seconds_sum") == pytest.approx(0.15 + 0.05)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_requests_cut_short_tell_nothing_of_lengths(reason: str) -> None:
    read = Feed()
    read.feed.update(state(records=[record(finish_reason=reason)]))
    assert read("queue_seconds_count") == 1
    assert not read("output_tokens_count")


def test_a_request_that_was_never_scheduled_has_no_queue_time() -> None:
    read = Feed()
    read.feed.update(state(records=[record(queue_s=None, finish_reason="abort", output_tokens=0)]))
    assert not read("queue_seconds_count")
    read.feed.update(state(records=[record(output_tokens=0)]))
    assert not read("normalized_latency_seconds_count"), "no division by zero"


def test_lost_records_are_counted() -> None:
    read = Feed()
    read.feed.update(state(lost_records=3))
    read.feed.update(state(lost_records=2))
    assert read("lost_records_total") == 5


def test_engines_are_kept_apart_and_share_the_metrics() -> None:
    one = Feed()
    two = Feed(engine=1, model=one.model)
    one.feed.update(state(steps=3))
    two.feed.update(state(steps=4))
    assert (one("steps_total"), two("steps_total")) == (3, 4)


def test_metrics_survive_vllm_clearing_its_own() -> None:
    """vLLM unregisters its collectors whenever another engine is built in the process."""
    read = Feed()
    prometheus.unregister_vllm_metrics()
    read.feed.update(state(steps=3))
    assert read("steps_total") == 3


def test_sizes_of_the_tier_follow_the_state() -> None:
    read = Feed("kv_tier_")
    read.feed.update(state(kv_tier=TIER))
    assert (read("capacity_bytes", tier="host"), read("used_bytes", tier="host")) == (10_000, 4000)
    assert read("capacity_bytes", tier="disk") is None, "there is none"
    names = ("capacity_chunks", "used_chunks", "writing_chunks", "reading_chunks")
    assert [read(name) for name in names] == [10, 4, 1, 2]
    assert read("low_reuse_salts") == 1
    assert [read("conversations", state=name) for name in ("running", "kept", "gone")] == [1, 2, 3]
    assert read("idle_device_blocks") == 7
    assert read("copy_bytes_per_second", direction="load") == 5e9
    read.feed.update(state(kv_tier={**TIER, "disk": {"used_chunks": 3, "used_bytes": 300, "capacity_bytes": 900}}))
    assert (read("capacity_bytes", tier="disk"), read("used_bytes", tier="disk")) == (900, 300)


def test_totals_of_the_tier_become_increments() -> None:
    read = Feed("kv_tier_")
    later = copy.deepcopy(TIER)
    later.update(stored_chunks=18, loaded_chunks=15, refused_chunks=16, unsaved_chunks=3)
    later["gone_chunks"].update(room=7, dropped=2)
    later["exposed_s"].update(store=1.0)
    later["conversations"].update(expired=9)
    for tier in (TIER, TIER, later):
        read.feed.update(state(kv_tier=tier))
        assert read("stored_chunks_total") == tier["stored_chunks"]
        assert read("loaded_chunks_total") == tier["loaded_chunks"]
        assert read("refused_chunks_total") == tier["refused_chunks"]
        assert read("unsaved_chunks_total") == tier["unsaved_chunks"]
        assert read("generated_chunks_total", fate="omitted") == tier["generated_chunks"]["omitted"]
        assert {reason: read("gone_chunks_total", reason=reason) for reason in REASONS} == tier["gone_chunks"]
        for direction in ("store", "load"):
            assert read("copy_seconds_total", direction=direction) == tier["copy_s"][direction]
            assert read("exposed_seconds_total", direction=direction) == tier["exposed_s"][direction]
            assert read("quantise_seconds_total", direction=direction) == tier["quantise_s"][direction]
        for name in ("expired", "dropped"):
            assert read(f"{name}_conversations_total") == tier["conversations"][name]


def test_what_becomes_of_preempted_requests_begins_at_zero() -> None:
    read = Feed("kv_tier_")
    read.feed.update(state(kv_tier=TIER))
    assert [read("preemptions_total", fate=fate) for fate in ("keep", "swap", "recompute")] == [0, 0, 0]
    waits = {"waits_compared": 2, "wait_expected_s": 3.0, "wait_actual_s": 5.0, "wait_error_s": 2.5}
    read.feed.update(state(kv_tier=TIER, dispositions={"swap": 3}, **waits))
    assert read("preemptions_total", fate="swap") == 3
    assert read("waits_total") == 2
    assert [read(f"wait_{name}_seconds_total") for name in ("expected", "actual", "error")] == [3.0, 5.0, 2.5]


def test_attention_is_counted_by_kernel_and_by_format() -> None:
    read = Feed("attention_")
    read.feed.update(state())
    assert read("steps_total", kernel="own") is None
    read.feed.update(state(attention={"steps": {"own": 3}, "tokens": {"own bfloat16": 70, "own int8": 30}}))
    later = {"steps": {"own": 5, "stock": 1}, "tokens": {"own bfloat16": 90, "own int8": 30, "stock bfloat16": 8}}
    read.feed.update(state(attention=later))
    assert [read("steps_total", kernel=kernel) for kernel in ("own", "stock")] == [5, 1]
    kinds = [("own", "bfloat16"), ("own", "int8"), ("stock", "bfloat16")]
    assert [read("tokens_total", kernel=kernel, format=kept) for kernel, kept in kinds] == [90, 30, 8]


@pytest.mark.parametrize("name", ["stored_chunks_total", "waits_total", "used_chunks"])
def test_without_a_tier_there_are_no_such_metrics(name: str) -> None:
    read = Feed("kv_tier_")
    read.feed.update(state(dispositions={"keep": 3}, waits_compared=4))
    assert read(name) is None


def test_records_on_the_device_are_counted_and_there_are_none_without_an_arena() -> None:
    read = Feed("kv_device_record")
    read.feed.update(state())
    assert read("s", state="kept") is None
    first = {
        "records": {"held": 2, "kept": 5, "empty": 23}, "moves": {"demoted": 9, "partial": 1}, "forgotten": {"lost": 1},
        "read_tokens": 128, "resumed_tokens": 30,
    }  # fmt: skip
    read.feed.update(state(kv_device=first))
    read.feed.update(state(kv_device={**first, "moves": {"demoted": 12, "partial": 1, "resumed": 1}}))
    assert [read("s", state=kind) for kind in ("held", "kept", "empty")] == [2, 5, 23]
    assert [read("_moves_total", kind=kind) for kind in ("demoted", "partial", "resumed")] == [12, 1, 1]
    assert read("s_forgotten_total", reason="lost") == 1
    assert (read("s_read_tokens_total"), read("s_resumed_tokens_total")) == (128, 30)


def test_totals_of_gaps_become_increments_and_there_are_none_where_gaps_are_not_crossed() -> None:
    read = Feed("kv_gaps")
    read.feed.update(state())
    assert read("_total") is None
    read.feed.update(state(kv_gaps=GAPS))
    read.feed.update(state(kv_gaps={**GAPS, "requests_by_gaps": {"1": 4, "2": 1}, "tokens_loaded": 33}))
    assert [read("_requests_total", gaps=gaps) for gaps in ("1", "2")] == [4, 1]
    assert read("_total") == 3
    assert [read("_tokens_total", source=source) for source in ("device", "host", "computed")] == [64, 33, 96]
    assert [read("_computed_tokens_total", reason=reason) for reason in ("missing", "rows")] == [80, 16]
    assert read("_refused_total", reason="rows") == 4
