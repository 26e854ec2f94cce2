"""Metrics of a run: an example worked by hand, laws, and agreement with those of real servers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.contract.objective import NO_SLO, Slo
from vllm_ext.report.results import Result, Workload
from vllm_ext.simulation.measure import latency
from vllm_ext.simulation.measure.metrics import summarise, windows_of
from vllm_ext.simulation.measure.run_data import (
    REJECTED,
    UNFINISHED,
    GapHistogram,
    RequestRow,
    RequestTable,
    RunData,
    TimeSeries,
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A request of a run; an aborted one has no tokens here."""

    arrival_s: float
    tokens_s: tuple[float, ...] = ()
    """When each token came."""
    end_s: float = 0.0
    """When it was aborted."""
    scheduled_s: float = math.nan
    waited_s: float = 0.0
    prompt_tokens: int = 100
    cached_prompt_tokens: int = 0
    predicted_tokens: int = 0
    preemptions: int = 0
    tier: str = ""
    session_id: str = ""
    slo_ttft_s: float = math.nan
    slo_tbt_s: float = math.nan
    slo_e2e_s: float = math.nan


def make_run(
    rows: Sequence[Row], *, unserved: RequestTable | None = None, series: TimeSeries | None = None, **counters: float
) -> RunData:
    table, gaps = RequestTable(), GapHistogram()
    for index, row in enumerate(rows):
        between = [b - a for a, b in zip(row.tokens_s, row.tokens_s[1:], strict=False)]
        for gap_s in between:
            gaps.add(gap_s)
        fields = {name: value for name, value in vars(row).items() if name not in ("tokens_s", "end_s", "scheduled_s")}
        table.append(
            RequestRow(
                **fields,
                req_id=f"r{index}",
                finish_reason="stop" if row.tokens_s else "abort",
                output_tokens=len(row.tokens_s),
                true_output_tokens=max(len(row.tokens_s), 1),
                first_scheduled_s=row.scheduled_s,
                first_token_s=row.tokens_s[0] if row.tokens_s else math.nan,
                finish_s=row.tokens_s[-1] if row.tokens_s else row.end_s,
                max_gap_s=max(between, default=math.nan),
            )
        )
    return RunData(
        label="test",
        requests=table,
        gaps=gaps,
        unserved=unserved or RequestTable(),
        series=series or TimeSeries(),
        counters=counters,
        duration_s=max((row.tokens_s[-1] if row.tokens_s else row.end_s for row in rows), default=0.0),
    )


def spread(name: str, unit: str, **values: float) -> dict[str, float]:
    """``ttft_mean_ms``, ``ttft_p50_ms``, ..."""
    return {f"{name}_{part}_{unit}": value for part, value in values.items()}


def test_every_metric_of_four_requests_worked_by_hand() -> None:
    rows = [
        # met: first token after 1 s (2 allowed), gaps 1 and 1 s (1.5 allowed); e2e 3 s, so 1 s/token
        Row(arrival_s=0, scheduled_s=0, tokens_s=(1, 2, 3), cached_prompt_tokens=50, predicted_tokens=3, tier="gold",
            slo_ttft_s=2, slo_tbt_s=1.5),
        # missed: a preemption made a gap of 3 s (2 allowed); e2e 5 s, so 5/3 s/token
        Row(arrival_s=1, scheduled_s=1, tokens_s=(2, 3, 6), prompt_tokens=200, predicted_tokens=6, tier="gold",
            preemptions=1, waited_s=2, slo_tbt_s=2),
        # met: nothing asked for; one token after 5 s
        Row(arrival_s=2, scheduled_s=5, tokens_s=(7,), waited_s=3, tier="bronze"),
        # missed: gave up after 6 s without a token, though 10 were allowed
        Row(arrival_s=3, end_s=9, waited_s=6, tier="bronze", slo_e2e_s=10),
    ]  # fmt: skip
    series = TimeSeries()
    series.add(0.0, 1, 0, 0.1, 0.0, 0.0, 0, 0, 0, 0)  # stands for 2 s
    series.add(2.0, 2, 1, 0.5, 0.0, 4e6, 0, 0, 0, 0)  # 4 s
    series.add(6.0, 1, 0, 0.3, 0.2, 8e6, 0, 0, 0, 0)  # 3 s, until the end at 9 s
    run = make_run(rows, series=series, steps=18, device_busy_s=4.5, prefill_tokens=350, decode_tokens=10)
    assert summarise(run) == pytest.approx(
        {
            "requests": 3,
            "aborted_requests": 1,
            "preemptions": 1,
            "prompt_tokens": 400,
            "cached_prompt_tokens_fraction": 50 / 400,
            "preempted_requests_fraction": 1 / 3,
            "output_tokens": 7,
            "duration_s": 7,  # arrival at 0 to last token at 7
            "run_duration_s": 9,
            **spread("normalised_latency", "ms_per_token",
                     mean=(1 + 5 / 3 + 5) / 3 * 1000, p50=5 / 3 * 1000,
                     p90=(5 / 3 + 0.8 * 10 / 3) * 1000, p99=(5 / 3 + 0.98 * 10 / 3) * 1000),
            **spread("ttft", "ms", mean=(1 + 1 + 5) / 3 * 1000, p50=1000, p90=4200, p99=4920),
            **spread("e2e", "ms", mean=(3 + 5 + 5) / 3 * 1000, p50=5000, p90=5000, p99=5000),
            **spread("tpot", "ms", mean=1500, p99=1990),  # 2 s / 2 and 4 s / 2
            **spread("tbt", "ms", mean=1500, p50=1000, p90=2400, p99=2940, max=3000),  # gaps 1, 1, 1, 3 s
            **spread("scheduling_delay", "s", mean=1, p50=0, p99=0.98 * 3),  # 0, 0, 3 s
            **spread("waited", "s", mean=5 / 3, p99=2 + 0.98, max=3),  # 0, 2, 3 s
            "on_time_fraction": 0,  # 1, 5/3 and 5 s/token; 0.2 are allowed
            "throughput_tokens_per_s": 7 / 7,
            "throughput_requests_per_s": 3 / 7,
            "goodput_requests_per_s": 2 / 7,
            "goodput_tokens_per_s": (3 + 1) / 7,
            "slo_attainment_fraction": 2 / 4,
            "slo_ttft_attainment_fraction": 1,
            "slo_tbt_attainment_fraction": 1 / 2,
            "slo_e2e_attainment_fraction": 0,
            "tier.gold.requests": 2,
            "tier.gold.slo_attainment_fraction": 1 / 2,
            "tier.gold.goodput_requests_per_s": 1 / 7,
            "tier.gold.goodput_tokens_per_s": 3 / 7,
            **spread("tier.gold.normalised_latency", "ms_per_token",
                     mean=(1 + 5 / 3) / 2 * 1000, p99=(1 + 0.99 * 2 / 3) * 1000),
            **spread("tier.gold.ttft", "ms", mean=1000, p99=1000),
            "tier.bronze.requests": 1,
            "tier.bronze.slo_attainment_fraction": 1 / 2,
            "tier.bronze.goodput_requests_per_s": 1 / 7,
            "tier.bronze.goodput_tokens_per_s": 1 / 7,
            **spread("tier.bronze.normalised_latency", "ms_per_token", mean=5000, p99=5000),
            **spread("tier.bronze.ttft", "ms", mean=5000, p99=5000),
            "predicted_requests": 2,
            "prediction_relative_error_median_fraction": (0 + 1) / 2,
            "prediction_bucket_accuracy_fraction": 1,  # and no rank correlation: both lengths are 3
            "mean_running_requests": (1 * 2 + 2 * 4 + 1 * 3) / 9,
            "max_running_requests": 2,
            "mean_waiting_requests": 1 * 4 / 9,
            "max_waiting_requests": 1,
            "mean_kv_used_fraction": (0.1 * 2 + 0.5 * 4 + 0.3 * 3) / 9,
            "max_kv_used_fraction": 0.5,
            "mean_tier_used_fraction": 0.2 * 3 / 9,
            "max_tier_used_fraction": 0.2,
            "transfer_bytes": 8e6,
            "steps": 18,
            "steps_per_s": 2,
            "device_busy_s": 4.5,
            "device_busy_fraction": 0.5,
            "prefill_tokens": 350,
            "decode_tokens": 10,
            "tokens_per_step": 20,
        },
        rel=1e-3,  # the width of a bin of gaps
    )  # fmt: skip


def test_windows_are_parts_by_arrival_and_the_middle_is_between_quarters_of_the_ends() -> None:
    """Request i arrives at i and ends at 2 i + 2, so that its latency is i + 2; the rows come last arrival first."""
    rows = [Row(arrival_s=i, tokens_s=(i + 1.0, 2.0 * i + 2), slo_e2e_s=5.0) for i in reversed(range(8))]
    found = windows_of(make_run(rows), 2)
    assert found["window_0.e2e_mean_ms"] == pytest.approx(3500)
    assert found["window_1.e2e_mean_ms"] == pytest.approx(7500)
    assert found["window_1.e2e_p99_ms"] == pytest.approx(8970)
    assert found["window_0.ttft_p90_ms"] == pytest.approx(1000)
    assert (found["window_0.slo_attainment_fraction"], found["window_1.slo_attainment_fraction"]) == (1.0, 0.0)
    assert found["middle_requests_per_s"] == pytest.approx(4 / 8)
    assert windows_of(make_run(rows), 0) == windows_of(make_run(rows), 5) == {}


def test_what_later_turns_found_of_their_histories_worked_by_hand() -> None:
    """The second turn begins with 100 + 2 tokens, of which 90 are found; the third with 122 of 150, all found."""
    rows = [
        Row(arrival_s=5.0, tokens_s=(6.0,), session_id="a", prompt_tokens=150, cached_prompt_tokens=144),
        Row(arrival_s=0.0, tokens_s=(1.0, 2.0), session_id="a", prompt_tokens=100, cached_prompt_tokens=16),
        Row(arrival_s=3.0, tokens_s=(4.0, 4.5), session_id="a", prompt_tokens=120, cached_prompt_tokens=90),
        Row(arrival_s=3.0, tokens_s=(4.0, 4.5), prompt_tokens=120, cached_prompt_tokens=90),
        Row(arrival_s=9.0, end_s=9.5, session_id="a", prompt_tokens=200),
    ]
    metrics = summarise(make_run(rows))
    assert metrics["history_tokens"] == 102 + 122
    assert metrics["history_computed_tokens"] == 12
    assert metrics["history_found_fraction"] == 212 / 224
    assert "history_tokens" not in summarise(make_run(rows[3:4]))


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        # of three pairs, (10, 20) and (10, 30) are in the order of the true lengths, (20, 30) is not
        (
            ((10, 5), (20, 50), (30, 40)),
            {"kendall_tau": 1 / 3, "relative_error_median_fraction": 0.6, "bucket_accuracy_fraction": 1},
        ),
        # buckets 0-199, 200-399, ...: both in the first; 199 and 200 in different ones; both in the second
        (((1, 199), (200, 199), (399, 200), (400, 399)), {"bucket_accuracy_fraction": 2 / 4}),
        (((100, 1), (100, 90), (100, 100)), {"relative_error_median_fraction": 1 / 9}),
        (((0, 5), (0, 6)), {}),
    ],
    ids=["rank correlation", "buckets", "a one-token answer does not decide", "nobody predicted"],
)
def test_predictions_are_judged(pairs: Sequence[tuple[int, int]], expected: dict[str, float]) -> None:
    rows = [Row(arrival_s=0, scheduled_s=0, predicted_tokens=p, tokens_s=(1.0,) * true) for p, true in pairs]
    found = {k.removeprefix("prediction_"): v for k, v in summarise(make_run(rows)).items() if "prediction_" in k}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert bool(found) == bool(expected)


def test_real_and_simulated_runs_have_one_vocabulary_and_equal_values() -> None:
    rows = [
        Row(arrival_s=0.5 * i, scheduled_s=0.5 * i, tokens_s=tuple(0.5 * i + 0.1 * k**1.1 for k in range(1, 4 + i)))
        for i in range(5)
    ]
    real = latency.summarise(
        [latency.RequestTimeline(req_id="r", arrival_s=row.arrival_s, token_times_s=row.tokens_s) for row in rows]
    )
    simulated = summarise(make_run(rows))
    assert {key: simulated[key] for key in real} == pytest.approx(real, rel=1e-3)


def test_without_a_finished_request_only_finite_counts_remain() -> None:
    metrics = summarise(make_run([Row(arrival_s=0, end_s=4)], unfinished_requests=7, policy_share=math.nan))
    assert metrics == {
        "requests": 0,
        "aborted_requests": 1,
        "unfinished_requests": 7,
        "output_tokens": 0,
        "preemptions": 0,
        "run_duration_s": 4,
    }
    assert summarise(make_run([]))["requests"] == 0


def test_exact_integrals_of_the_run_go_before_its_samples() -> None:
    series = TimeSeries()
    series.add(0.0, 4, 4, 0.4, 0.0, 0.0, 0, 0, 0, 0)
    counters = {"mean_running_requests": 3.5, "max_kv_used_fraction": 0.9, "preemptions": 12.0}
    metrics = summarise(make_run([Row(arrival_s=0, scheduled_s=0, tokens_s=(1,))], series=series, **counters))
    assert {key: metrics[key] for key in counters} == counters
    assert (metrics["max_running_requests"], metrics["mean_waiting_requests"]) == (4, 4)


@pytest.mark.parametrize(
    "row",
    [
        Row(arrival_s=0, scheduled_s=0, tokens_s=(1,), slo_tbt_s=0.001),
        Row(arrival_s=1, scheduled_s=1, tokens_s=(2, 3), slo_ttft_s=1, slo_tbt_s=1, slo_e2e_s=2),
    ],
    ids=["a single token meets any bound on gaps", "met to the second"],
)
def test_objective_is_met(row: Row) -> None:
    assert summarise(make_run([row]))["slo_attainment_fraction"] == 1


def test_requests_without_a_tier_make_no_tier() -> None:
    run = make_run([Row(arrival_s=0, scheduled_s=0, tokens_s=(1,)), Row(arrival_s=0, end_s=1, tier="a")])
    tiers = {key: value for key, value in summarise(run).items() if key.startswith("tier.")}
    assert tiers == {
        "tier.a.requests": 0,
        "tier.a.slo_attainment_fraction": 0,
        "tier.a.goodput_requests_per_s": 0,
        "tier.a.goodput_tokens_per_s": 0,
    }


@dataclass(frozen=True, kw_only=True)
class Unserved:
    """A request that had not ended at the end of the run, 10 s after its start."""

    reason: str = UNFINISHED
    arrival_s: float = 8.0
    first_token_s: float = math.nan
    max_gap_s: float = math.nan
    slo: Slo = NO_SLO
    tier: str = ""

    def row(self) -> RequestRow:
        same = {name: getattr(self, name) for name in ("arrival_s", "first_token_s", "max_gap_s", "tier")}
        slo = {f"slo_{name}": bound for name, bound in asdict(self.slo).items() if bound is not None}
        return RequestRow(finish_reason=self.reason, **same, **slo)


MET = Row(arrival_s=0, scheduled_s=0, tokens_s=(1, 10), slo_ttft_s=2, slo_tbt_s=20, slo_e2e_s=20)


@pytest.mark.parametrize(
    ("lost", "judged"),
    [
        (Unserved(reason=REJECTED), ["all"]),
        (Unserved(reason=REJECTED, arrival_s=10.0, slo=Slo(ttft_s=50)), ["ttft", "all"]),
        (Unserved(slo=Slo(ttft_s=1.5)), ["ttft", "all"]),
        (Unserved(slo=Slo(ttft_s=2.0)), []),
        (Unserved(first_token_s=9.5, slo=Slo(ttft_s=1.0, e2e_s=4)), ["ttft", "all"]),
        (Unserved(first_token_s=8.5, slo=Slo(ttft_s=1.0, e2e_s=4)), []),
        (Unserved(first_token_s=8.5, max_gap_s=1.5, slo=Slo(tbt_s=1.0)), ["tbt", "all"]),
        (Unserved(first_token_s=8.5, max_gap_s=1.0, slo=Slo(tbt_s=1.0)), []),
        (Unserved(slo=Slo(e2e_s=1.0)), ["e2e", "all"]),
        (Unserved(), []),
    ],
    ids=["rejected", "rejected, with time left", "no first token in time", "still in time", "late first token",
         "first token in time", "gap too long", "gap still open", "too late to end in time", "nothing asked for"],
)  # fmt: skip
def test_who_can_no_longer_meet_an_objective_has_missed_it_and_who_still_can_is_not_judged(
    lost: Unserved, judged: list[str]
) -> None:
    table = RequestTable()
    table.append(lost.row())
    metrics = summarise(make_run([MET], unserved=table))
    shares = {"all": "slo_attainment_fraction"} | {n: f"slo_{n}_attainment_fraction" for n in ("ttft", "tbt", "e2e")}
    assert {name: metrics[key] for name, key in shares.items()} == {n: 0.5 if n in judged else 1 for n in shares}
    assert metrics["goodput_requests_per_s"] == 1 / 10


def test_who_was_rejected_counts_in_its_tier() -> None:
    table = RequestTable()
    for tier in ("a", "a", "b"):
        table.append(Unserved(reason=REJECTED, tier=tier).row())
    metrics = summarise(make_run([Row(**{**vars(MET), "tier": "a"})], unserved=table))
    assert metrics["slo_attainment_fraction"] == 1 / 4
    assert metrics["tier.a.slo_attainment_fraction"] == 1 / 3
    assert metrics["tier.b.slo_attainment_fraction"] == 0


SLOS = st.one_of(st.just(math.nan), st.floats(0.01, 5))


@st.composite
def requests(draw: st.DrawFn) -> Row:
    arrival_s = draw(st.floats(0, 50))
    if draw(st.integers(0, 5)) == 0:
        return Row(arrival_s=arrival_s, end_s=arrival_s + draw(st.floats(0, 5)), tier=draw(st.sampled_from(("", "a"))))
    gaps_s = draw(st.lists(st.floats(0.001, 3), min_size=1, max_size=6))
    tokens_s = [arrival_s + gaps_s[0]]
    for gap_s in gaps_s[1:]:
        tokens_s.append(tokens_s[-1] + gap_s)
    return Row(
        arrival_s=arrival_s,
        scheduled_s=arrival_s,
        tokens_s=tuple(tokens_s),
        tier=draw(st.sampled_from(("", "a", "b"))),
        predicted_tokens=draw(st.integers(0, 500)),
        slo_ttft_s=draw(SLOS),
        slo_tbt_s=draw(SLOS),
        slo_e2e_s=draw(SLOS),
    )


@given(st.lists(requests(), min_size=1, max_size=12))
def test_laws_of_goodput_attainment_and_order(rows: list[Row]) -> None:
    metrics = summarise(make_run(rows))
    Result(name="x", command="x", config={}, seed=0, workload=Workload(name="x", rows=1, sha256=""), metrics=metrics)
    for kind in ("requests_per_s", "tokens_per_s"):
        whole = metrics.get(f"goodput_{kind}", 0.0)
        assert whole <= metrics.get(f"throughput_{kind}", 0.0) * (1 + 1e-12)
        of_tiers = [v for k, v in metrics.items() if k.startswith("tier.") and k.endswith(f".goodput_{kind}")]
        assert sum(of_tiers) <= whole * (1 + 1e-12)
    for key, value in metrics.items():
        if key.endswith("attainment_fraction"):
            assert 0 <= value <= 1
    percentiles = [metrics.get(f"normalised_latency_{p}_ms_per_token", 0.0) for p in ("p50", "p90", "p99")]
    assert percentiles == sorted(percentiles)


@given(
    st.lists(requests(), min_size=1, max_size=8).flatmap(lambda rows: st.tuples(st.just(rows), st.permutations(rows)))
)
def test_the_order_of_the_rows_does_not_matter(both: tuple[list[Row], list[Row]]) -> None:
    rows, shuffled = both
    assert summarise(make_run(shuffled)) == pytest.approx(summarise(make_run(rows)), rel=1e-9)


@given(st.lists(requests(), min_size=1, max_size=8))
def test_objectives_that_nobody_has_are_met_by_all_who_finished(rows: list[Row]) -> None:
    free = [Row(**{**vars(row), "slo_ttft_s": math.nan, "slo_tbt_s": math.nan, "slo_e2e_s": math.nan}) for row in rows]
    metrics = summarise(make_run(free))
    if metrics["requests"]:
        assert metrics["slo_attainment_fraction"] == pytest.approx(metrics["requests"] / len(rows))
        assert metrics["goodput_tokens_per_s"] == metrics["throughput_tokens_per_s"]


def test_a_request_is_on_time_by_its_first_token_and_by_its_last() -> None:
    rows = [
        Row(arrival_s=0, scheduled_s=0, tokens_s=(0.1, 0.2, 0.6)),  # exactly 0.2 s/token
        Row(arrival_s=0, scheduled_s=0, tokens_s=(0.1, 0.2, 0.61)),
        Row(arrival_s=0, scheduled_s=4, tokens_s=(5.1, *(5.2 + 0.01 * i for i in range(50)))),  # a late first token
        Row(arrival_s=0, scheduled_s=4, tokens_s=(4.9, *(5.0 + 0.01 * i for i in range(50)))),
    ]
    assert summarise(make_run(rows))["on_time_fraction"] == 0.5
