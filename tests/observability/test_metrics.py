"""The Prometheus feed: totals become increments, levels that vanish read 0, records fill the histograms.

The metrics live in the registry of the process; each test uses a model name of its own, and sees only its own samples.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.v1.metrics import prometheus

from vllm_ext.observability.metrics import EngineFeed, metrics

_numbers = itertools.count()


def state(**changes: Any) -> dict[str, Any]:
    return {
        "system": "alise",
        "policies": "alise: x",
        "running": 1,
        "waiting_by_level": {},
        "oldest_wait_s": 0.0,
        "runtime": {"coefficients": [0.0] * 5, "num_observations": 0, "mean_abs_relative_error": 0.0},
        "preemptions": {"policy": 0, "memory": 0},
        "refusals": {},
        "fallbacks": 0,
        "stalls": 0,
        "demotions": 0,
        "late_predictions": 0,
        "bad_hints": 0,
        "policy_steps": 0,
        "policy_s": 0.0,
        "steps": 0,
        "records": [],
        "next_record": 0,
        "lost_records": 0,
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
        **changes,
    }


class Feed:
    def __init__(self, engine: int = 0, model: str | None = None) -> None:
        self.model = model or f"model-{next(_numbers)}"
        self.engine = str(engine)
        self.feed = EngineFeed(self.model, engine)

    def __call__(self, name: str, **labels: str) -> float | None:
        labels = {"model_name": self.model, "engine": self.engine, **labels}
        return REGISTRY.get_sample_value(f"vllm_ext:{name}", labels)


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
    one = Feed(0)
    two = Feed(1, one.model)
    one.feed.update(state(steps=3))
    two.feed.update(state(steps=4))
    assert (one("steps_total"), two("steps_total")) == (3, 4)
    assert metrics() is metrics()


def test_metrics_survive_vllm_clearing_its_own() -> None:
    """vLLM unregisters its collectors whenever another engine is built in the process."""
    read = Feed()
    prometheus.unregister_vllm_metrics()
    read.feed.update(state(steps=3))
    assert read("steps_total") == 3
