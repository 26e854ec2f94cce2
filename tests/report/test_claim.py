"""A claim is met in the direction that its comparison says, and tells why it was not."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_ext.report.claim import Claim, PaperClaim, Reason


@pytest.mark.parametrize(
    ("op", "value", "met"),
    [
        ("<=", 1.0, True),
        (">=", 1.0, True),
        ("<", 1.0, False),
        (">", 1.0, False),
        ("<", 0.5, True),
        ("<=", 2.0, False),
        ("<=", float("nan"), False),
        (">=", float("nan"), False),
    ],
)
def test_a_claim_is_met_as_its_comparison_says(op: str, value: float, met: bool) -> None:
    made = Claim(name="m", value=value, op=op, goal=1.0, facts="measured once", why="a slow machine")
    assert made.met is met
    assert made.note == ("measured once" if met else "measured once; a slow machine")


def test_unknown_comparison_is_refused() -> None:
    with pytest.raises(ValueError, match="op='==' of claim m: must be one of <=, >=, <, >"):
        Claim(name="m", value=1.0, op="==", goal=1.0)


def paper(**fields: Any) -> PaperClaim:
    return PaperClaim(**{"name": "ratio", "goal": 2.0, "value": 2.0, **fields})


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({"value": 2.19}, "matched"),
        ({"value": 1.81}, "matched"),
        ({"value": 2.21}, "above"),
        ({"value": 1.79}, "below"),
        ({"value": 2.21, "op": "<="}, "below"),
        ({"value": 1.79, "op": "<="}, "above"),
        ({"value": 1.5, "goal": 1.3, "most": 1.8}, "matched"),
        ({"value": 1.99, "goal": 1.3, "most": 1.8}, "above"),
        ({"value": 1.16, "goal": 1.3, "most": 1.8}, "below"),
        ({"value": 1.6, "interval": (1.4, 1.8)}, "matched"),
        ({"value": 1.6, "interval": (1.5, 1.7)}, "below"),
        ({"value": 2.4, "interval": (2.1, 2.7)}, "matched"),
        ({"value": 9.0, "kind": "tendency"}, "tendency"),
        ({"value": 2.0, "reasons": {"not comparable": Reason("no pipeline", "row `x`")}}, "not comparable"),
    ],
)
def test_paper_s_figure_is_judged_in_both_directions(fields: dict[str, Any], verdict: str) -> None:
    made = paper(**fields)
    assert made.verdict == verdict
    assert made.met is (verdict != "below")
    assert PaperClaim.kept(made.as_dict()).verdict == verdict


def test_reason_is_that_of_the_verdict() -> None:
    reasons = {"above": Reason("memory is larger", "row `16 GB`"), "below": Reason("steps are longer", "fig3")}
    low, high, equal = (paper(value=value, reasons=reasons) for value in (1.0, 3.0, 2.0))
    assert (low.reason, high.reason, equal.reason) == (reasons["below"], reasons["above"], None)
    assert low.note == "steps are longer"
    assert str(high) == "paper: ratio: 2; here 3: above (memory is larger; row `16 GB`)"
    assert paper(value=1.0).note == "the reason is not known"


def test_reason_of_many_words_is_refused() -> None:
    with pytest.raises(ValueError, match="must have at most 10 words"):
        paper(reasons={"below": Reason("one two three four five six seven eight nine ten eleven", "x")})


def test_what_the_paper_states_is_said_as_it_states_it() -> None:
    assert paper(goal=1.3, most=1.8).paper == "1.3 to 1.8"
    assert paper(kind="up to").paper == "up to 2"
    assert paper(kind="tendency").paper == "no number"
    assert paper(value=1.6, interval=(1.4, 1.8)).measured == "1.6 (1.4 to 1.8)"


def test_claim_that_is_kept_is_read_again_whole() -> None:
    made = paper(kind="up to", most=3.0, interval=(1.9, 2.1), ours=2.5, tuned=1.2, headline=True,
                 reasons={"below": Reason("a reason", "a row")})  # fmt: skip
    assert PaperClaim.kept(made.as_dict()) == made


def test_claim_from_before_there_were_verdicts_is_judged_too() -> None:
    old = {"name": "ratio", "value": 3.0, "op": ">=", "goal": 2.0, "met": True, "note": "so it was", "headline": True}
    assert PaperClaim.kept(old).verdict == "above"
