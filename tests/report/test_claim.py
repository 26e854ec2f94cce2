"""A claim is met in the direction that its comparison says, and tells why it was not."""

from __future__ import annotations

import pytest

from vllm_ext.report.claim import Claim


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
