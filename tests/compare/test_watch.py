"""What is seen of a server that serves."""

from __future__ import annotations

import threading

import pytest

from vllm_ext.compare import watch
from vllm_ext.compare.watch import Timeline, Watch
from vllm_ext.report.scraped import Snapshot


def metrics(at_s: float, *, running: int, preempted: int) -> Snapshot:
    text = "".join(
        f'vllm:num_requests_running{{engine="{engine}"}} {running}\n'
        f'vllm:num_requests_waiting{{engine="{engine}"}} {engine}\n'
        f'vllm:kv_cache_usage_perc{{engine="{engine}"}} {0.25 + engine / 2}\n'
        f'vllm:num_preemptions_total{{engine="{engine}"}} {preempted}\n'
        for engine in (0, 1)
    )
    return Snapshot.parsed(text, at_s)


def test_requests_of_all_engines_count_together_and_kv_is_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_EVERY_S", 0.001)
    answers = [metrics(100.0 + at, running=at, preempted=3 + at) for at in range(3)]
    asked_often = threading.Event()

    def ask(url: str) -> Snapshot:
        assert url == "http://there"
        if len(answers) == 1:
            asked_often.set()
            return answers[0]
        return answers.pop(0)

    with Watch("http://there", ask) as seen:
        assert asked_often.wait(30)
    line = seen.timeline
    assert (line.at_s[:3], line.running[:3]) == ([0.0, 1.0, 2.0], [0.0, 2.0, 4.0])
    assert (line.waiting[0], line.kv_used[0], line.preemptions) == (1.0, 0.5, 4.0)
    assert Timeline.of({"timeline": line.kept()}) == line


def counters(**totals: float) -> Snapshot:
    return Snapshot.parsed("".join(f"vllm:{name}_total {value}\n" for name, value in totals.items()), 0.0)


@pytest.mark.parametrize(
    ("now", "cached"),
    [
        ({"prefix_cache_queries": 300, "prefix_cache_hits": 60}, 0.25),
        ({"prefix_cache_queries": 300, "prefix_cache_hits": 60, "external_prefix_cache_hits": 100}, 0.75),
        ({"prefix_cache_queries": 100, "prefix_cache_hits": 10}, None),
        ({}, None),
    ],
)
def test_what_prompts_found_on_the_device_and_outside_counts_over_the_run(
    now: dict[str, float], cached: float | None
) -> None:
    outside = {"external_prefix_cache_hits": 0.0} if "external_prefix_cache_hits" in now else {}
    line = Timeline()
    line.count(counters(prefix_cache_queries=100, prefix_cache_hits=10, **outside), counters(**now))
    assert line.cached == cached
    assert line.preemptions is None


@pytest.mark.parametrize("answer", [OSError("refused"), ValueError("no metrics"), Snapshot(1.0, [])])
def test_a_server_without_metrics_is_left_alone(answer: Exception | Snapshot) -> None:
    def ask(url: str) -> Snapshot:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with Watch("http://there", ask) as seen:
        pass
    assert seen.timeline == Timeline()
    assert Timeline.of({}) == Timeline()


def test_of_a_long_run_evenly_spread_moments_are_kept() -> None:
    line = Timeline()
    for at in range(1000):
        line.add(float(at), 1, 2, 0.5)
    kept = Timeline.of({"timeline": line.kept()})
    assert kept.at_s == [float(at) for at in range(0, 1000, 3)]
    assert len(kept.at_s) == len(kept.running) == len(kept.waiting) == len(kept.kv_used) <= watch._MOST
