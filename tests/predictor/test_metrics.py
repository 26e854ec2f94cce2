"""The Prometheus metrics of the length predictor: counters add up, and what is not known is not shown.

The metrics live in the registry of the process; each test uses a model name of its own, and sees only its own samples.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, multiprocess

from tests.support.extent import HANG_S
from vllm_ext.predictor.messages import Status
from vllm_ext.predictor.metrics import PredictorMetrics

_numbers = itertools.count()

STATUS = Status(
    ready=True, entries=30, learned=20, waiting=3, errors=1, examples=25, judged=20, coverage=0.9,
    relative_error=0.4, tau=-0.25,
)  # fmt: skip
JUDGEMENTS = ("predictor_p90_coverage", "predictor_relative_error", "predictor_kendall_tau")


class Read:
    def __init__(self, model: str | None = None) -> None:
        self.model = model or f"predictor-{next(_numbers)}"
        self.metrics = PredictorMetrics(self.model)

    def __call__(self, name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"vllm_ext:{name}", {"model_name": self.model, **labels})


def test_outcomes_are_counted_by_their_names() -> None:
    read = Read()
    read.metrics.outcome("predicted")
    read.metrics.outcome("predicted")
    read.metrics.outcome("lost", 5)
    read.metrics.outcome("timeout", 0)
    assert read("length_predictions_total", outcome="predicted") == 2
    assert read("length_predictions_total", outcome="lost") == 5
    assert read("length_predictions_total", outcome="timeout") is None


def test_what_was_dropped_is_counted_by_what_it_was() -> None:
    read = Read()
    read.metrics.dropped("finished", 3)
    read.metrics.dropped("finished")
    read.metrics.dropped("message", 0)
    assert read("predictor_dropped_total", what="finished") == 4
    assert read("predictor_dropped_total", what="message") is None


def test_latencies_fill_a_histogram() -> None:
    read = Read()
    for seconds in (0.004, 0.04, 40.0):
        read.metrics.latency(seconds)
    assert read("length_prediction_seconds_count") == 3
    assert read("length_prediction_seconds_sum") == 40.044
    assert read("length_prediction_seconds_bucket", le="0.005") == 1
    assert read("length_prediction_seconds_bucket", le="0.05") == 2
    assert read("length_prediction_seconds_bucket", le="30.0") == 2


def test_starts_become_increments() -> None:
    read = Read()
    for total in (0, 1, 1, 3, 3):
        read.metrics.starts(total)
    assert read("predictor_starts_total") == 3


def test_a_predictor_is_down_until_it_says_how_it_is_and_when_it_is_gone() -> None:
    read = Read()
    assert read("predictor_up") == 0
    read.metrics.status(STATUS)
    assert read("predictor_up") == 1
    read.metrics.status(None)
    assert read("predictor_up") == 0


def test_a_status_fills_the_gauges() -> None:
    read = Read()
    read.metrics.status(STATUS)
    names = ("entries", "learned", "queue", "errors", "examples")
    assert [read(f"predictor_{name}") for name in names] == [30, 20, 3, 1, 25]
    assert [read(name) for name in JUDGEMENTS] == [0.9, 0.4, -0.25]
    read.metrics.status(Status(entries=31, judged=21, tau=0.5))
    assert (read("predictor_entries"), read("predictor_errors"), read(JUDGEMENTS[2])) == (31, 0, 0.5)


def test_a_quality_that_a_handful_was_judged_by_is_not_shown() -> None:
    read = Read()
    read.metrics.status(Status(entries=3, judged=19, coverage=1.0, tau=1.0))
    assert read("predictor_entries") == 3
    assert [read(name) for name in JUDGEMENTS] == [None, None, None]


def test_two_models_of_a_process_have_metrics_of_their_own() -> None:
    one, other = Read(), Read()
    one.metrics.outcome("late")
    other.metrics.outcome("late", 4)
    assert one("length_predictions_total", outcome="late") == 1
    assert other("length_predictions_total", outcome="late") == 4


FRONT_END = """
import sys
from vllm_ext.predictor.metrics import PredictorMetrics
from vllm_ext.predictor.messages import Status

metrics = PredictorMetrics("m")
metrics.outcome("predicted", int(sys.argv[1]))
metrics.latency(0.02)
metrics.status(Status(entries=int(sys.argv[1])))
"""


def test_counters_of_several_front_ends_add_up_and_gauges_are_the_latest(tmp_path: Path) -> None:
    for number in ("2", "5"):
        env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", FRONT_END, number], env=env, check=True, timeout=HANG_S)
    registry = CollectorRegistry()
    collect: Any = multiprocess.MultiProcessCollector
    collect(registry, path=str(tmp_path))
    labels = {"model_name": "m"}
    counted = registry.get_sample_value("vllm_ext:length_predictions_total", {**labels, "outcome": "predicted"})
    assert counted == 7
    assert registry.get_sample_value("vllm_ext:length_prediction_seconds_count", labels) == 2
    assert registry.get_sample_value("vllm_ext:predictor_entries", labels) == 5
