"""Findings of several seeds, and of drawn and real lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_ext.experiments.experiment import Findings
from vllm_ext.experiments.merge import beside, merged
from vllm_ext.report.claim import Claim, PaperClaim
from vllm_ext.report.table import Table


def found(value: float, *, ours: float | None = None, more: tuple[Claim, ...] = ()) -> Findings:
    return Findings(
        tables=[Table(("x",), [(value,)], "Rates")],
        claims=[PaperClaim(name="ratio", goal=2.0, value=value, ours=ours),
                Claim(name="own", goal=1.0, value=value), *more],
        metrics={"rate_per_s": value}, baselines={"base": {"rate_per_s": 2 * value}}, workload=[],
    )  # fmt: skip


def test_one_seed_stays_as_it_is() -> None:
    one = found(1.5)
    assert merged({0: one}) is one


def test_several_seeds_become_means_with_an_interval() -> None:
    made = merged({seed: found(value, ours=value + 1) for seed, value in enumerate((1.0, 2.0, 3.0))})
    assert made.metrics == {"rate_per_s": 2.0}
    assert made.baselines == {"base": {"rate_per_s": 4.0}}
    assert made.config["seeds"] == [0, 1, 2]
    ratio, own = made.claims
    assert (ratio.value, own.value) == (2.0, 2.0)
    assert isinstance(ratio, PaperClaim)
    assert ratio.interval == pytest.approx((2 - 2.484, 2 + 2.484), abs=1e-3), "Student's, of two degrees of freedom"
    assert ratio.ours == 3.0
    assert made.tables[0].title == "Rates; seed 0"
    assert made.details["by_seed"]["2"] == {"rate_per_s": 3.0}


def test_of_two_seeds_both_values_are_told() -> None:
    ratio = merged({0: found(1.0), 1: found(3.0)}).claims[0]
    assert isinstance(ratio, PaperClaim)
    assert ratio.interval == (1.0, 3.0)


def test_what_is_beside_a_claim_may_be_of_the_first_seed() -> None:
    first = replace(found(1.0), metrics={"rate_per_s": 1.0, "at_half_per_s": 4.0})
    assert merged({0: first, 1: found(3.0)}).metrics == {"rate_per_s": 2.0, "seed 0: at_half_per_s": 4.0}


def test_claims_that_a_seed_lacks_are_left_out() -> None:
    extra = Claim(name="extra", goal=1.0, value=1.0)
    made = merged({0: found(1.0, ours=1.0, more=(extra,)), 1: found(1.0)})
    assert [claim.name for claim in made.claims] == ["ratio", "own"]
    assert isinstance(ratio := made.claims[0], PaperClaim)
    assert ratio.ours is None


def test_real_lengths_stand_behind_the_drawn_ones() -> None:
    drawn, real = (
        Findings(
            tables=[Table(("x",), [(value,)]), Table(("y",), [(3.0,)], "Of no file")], workload=[],
            claims=[PaperClaim(name="ratio", goal=1.0, value=value, headline=True),
                    PaperClaim(name="of no file", goal=1.0, value=3.0)],
            metrics={"rate": value, "of_no_file": 3.0},
        )
        for value in (1.0, 2.0)
    )  # fmt: skip
    both = beside(drawn, real, {"sharegpt.json", "alpaca.json"})
    assert [(claim.name, claim.value, claim.headline) for claim in both.claims] == [
        ("ratio", 1.0, True),
        ("of no file", 3.0, False),
        ("ratio, real lengths", 2.0, False),
    ]
    assert [table.title for table in both.tables] == ["", "Of no file", "real lengths"]
    assert both.metrics == {"rate": 1.0, "of_no_file": 3.0, "real lengths: rate": 2.0}
    assert both.config["real_lengths"] == ["alpaca.json", "sharegpt.json"]
