"""What Past-Future's reproductions are made of: rows, ratios of goodput, steps at equal evictions, claims."""

from __future__ import annotations

import pytest

from vllm_ext.experiments.papers import past_future as base
from vllm_ext.experiments.papers import past_future_load as load
from vllm_ext.experiments.papers import past_future_settings as settings

MODEL, DATA = "llama-2-7b", "Distribution-1"


def goodput(panel: tuple[str, str] = (MODEL, DATA), **of: float) -> dict[tuple[str, str, str, int], float]:
    """By scheduler with 100 clients; with 10 everybody has the same."""
    rows = {"published": load.PUBLISHED, "ours": base.OURS, "aggressive": load.AGGRESSIVE, "tuned": base.VLLM_TUNED,
            "conservative": load.CONSERVATIVE}  # fmt: skip
    names = {"longest": load.LONGEST, **{key: one.name for key, one in rows.items()}}
    return {
        (*panel, name, clients): of.get(key, 100.0) if clients == 100 else 1000.0
        for key, name in names.items()
        for clients in (10, 100)
    }


def test_the_artifacts_conservative_scheduler_reserves_12000_output_tokens_and_outputs_stay_as_they_are() -> None:
    by_name = {one.name: one for one in load._fig7_schedulers(2)}
    workload = base.DATASETS[DATA].workload(2, arrivals="closed-loop", clients=1, duration_s=1.0)
    bounds = {name: base.spec(one, MODEL, workload, shrink=2).workload.max_tokens for name, one in by_name.items()}
    assert bounds.pop(load.CONSERVATIVE.name) == 6000
    assert set(bounds.values()) == {2048}
    assert load.LONGEST in bounds


def test_up_to_two_to_three_times_is_the_largest_ratio_of_all_panels_with_the_most_clients() -> None:
    good = goodput(published=150.0) | goodput(
        (MODEL, "Distribution-2"), published=300.0, conservative=120.0, ours=360.0
    )
    claim = load._fig7_claim(good)
    assert (claim.value, claim.ours, claim.tuned) == (3.0, 3.6, 3.6)
    assert (claim.verdict, claim.paper) == ("matched", "up to 2 to 3")
    assert "Distribution-2" in claim.facts


def test_conservatives_reserve_is_the_reason_only_where_it_is_below_the_line() -> None:
    over_conservative = load._fig7_claim(goodput(published=900.0, conservative=90.0))
    over_aggressive = load._fig7_claim(goodput(published=900.0, aggressive=90.0))
    assert (over_conservative.reason, over_aggressive.reason) == (load.RESERVES["above"], None)
    assert (over_conservative.verdict, over_aggressive.verdict) == ("above", "above")


def test_a_scheduler_without_goodput_is_no_factor() -> None:
    good = goodput(published=150.0, conservative=0.0)
    assert load._fig7_claim(good).value == 1.5
    (row,) = load._fig7_ratios(good).rows
    assert row == (MODEL, DATA, 100, 1.5, None, 1.5, 1.0)


def test_settings_that_another_one_beats_in_both_are_on_no_line() -> None:
    assert settings.frontier([(5.0, 90.0), (1.0, 100.0), (4.0, 101.0), (9.0, 80.0)]) == [
        (1.0, 100.0), (5.0, 90.0), (9.0, 80.0)]  # fmt: skip


def test_steps_are_compared_at_evictions_that_both_reach() -> None:
    own, other = [(0.0, 100.0), (10.0, 80.0)], [(5.0, 180.0), (10.0, 160.0), (90.0, 1.0)]
    assert settings.at_equal_evictions(other, own) == pytest.approx(2.0)
    # Without a place in common: at the fewest evictions of the one that has more, which the other need not use up.
    assert settings.at_equal_evictions([(50.0, 40.0)], own) == pytest.approx(0.5)
    claim = settings._fig8_claim("aggressive", other, own, ours=(5.0, 60.0))
    assert (claim.verdict, claim.value, claim.ours) == ("tendency", pytest.approx(2.0), pytest.approx(3.0))
    assert settings._fig8_claim("aggressive", other, own, ours=(1.0, 60.0)).ours is None


def test_table_1_judges_steps_and_evictions_in_both_directions() -> None:
    paper = base.PUBLISHED[DATA]
    told = {
        (DATA, row): {"decoding_steps": steps, "future_kv_fraction": future / 100, "evicted_percent": evicted}
        for row, (steps, _, future, evicted) in paper.items()
    }
    told |= {(DATA, base.OURS.name): {**told[DATA, base.JUDGED.name], "decoding_steps": 200.0}}
    told |= {(DATA, base.VLLM_TUNED.name): {"decoding_steps": 400.0}}
    claims = list(base._table1_claims(DATA, told))
    assert {claim.verdict for claim in claims} == {"matched"}
    assert [claim.tuned for claim in claims if claim.tuned] == [0.5]
    told[DATA, base.JUDGED.name] = {**told[DATA, base.JUDGED.name], "evicted_percent": 9.0}
    assert next(base._table1_claims(DATA, told)).verdict == "below"


def test_rows_of_table_1_bear_the_papers_names() -> None:
    for data, paper in base.PUBLISHED.items():
        rows = {c.name for c in base._table1_rows(data, quick=False)}
        assert paper.keys() <= rows
