"""What a load costs whom, by hand."""

from __future__ import annotations

import pytest

from vllm_ext.kv.connector.step_loads import between_s, exposed_s, in_step_is_cheaper


@pytest.mark.parametrize(
    ("load_s", "step_s", "num_layers", "expected"),
    [
        (0.4, 4.0, 4, 0.1),  # hidden, but for the first layer's quarter
        (4.0, 4.0, 4, 1.0),  # layers keep pace: the last one's quarter is there after 4 s, and computes for 1 s
        (8.0, 4.0, 4, 5.0),  # the link sets the pace: 8 s, then the last layer's 1 s, less the step's own 4 s
        (2.0, 4.0, 1, 2.0),  # one layer hides nothing
        (0.0, 4.0, 4, 0.0),
    ],
)
def test_what_a_step_does_not_hide_of_a_load(load_s: float, step_s: float, num_layers: int, expected: float) -> None:
    assert exposed_s(load_s, step_s, num_layers) == pytest.approx(expected)


def test_between_steps_a_request_waits_for_whole_steps_or_where_nothing_runs_for_the_load_only() -> None:
    assert between_s(0.1, 1.0, others=3) == 2.0
    assert between_s(2.5, 1.0, others=3) == 4.0
    assert between_s(2.5, 1.0, others=0) == 2.5


def choose(load_s: float, others: int, planned_s: float = 0.0, num_layers: int = 10, behind_s: float = 0.0) -> bool:
    return in_step_is_cheaper(
        load_s, planned_s=planned_s, step_s=1.0, num_layers=num_layers, others=others, behind_s=behind_s
    )


@pytest.mark.parametrize("load_s", [0.001, 1.0, 50.0])
def test_alone_a_request_loads_within_the_step(load_s: float) -> None:
    assert choose(load_s, others=0)


def test_many_do_not_wait_long_for_one() -> None:
    """1 s of load makes the step 0.1 s longer, for all; between steps the request alone waits for 2 s."""
    assert choose(1.0, others=18)  # 19 * 0.1 < 2
    assert not choose(1.0, others=20)  # 21 * 0.1 > 2


def test_what_the_step_loads_already_counts() -> None:
    """Behind 2 s of loads, which make the step 1.1 s longer, another second costs each of the others all of it."""
    assert choose(1.0, others=1)
    assert choose(1.0, others=1, planned_s=2.0)  # 2.1 + 1 < 1 + 3
    assert not choose(1.0, others=2, planned_s=2.0)  # 2.1 + 2 > 1 + 3


def test_with_one_layer_loads_are_between_steps_as_soon_as_somebody_waits_long_enough() -> None:
    assert choose(0.5, others=3, num_layers=1)  # 4 * 0.5 = 2
    assert not choose(0.5, others=4, num_layers=1)


def test_behind_loads_that_nobody_waits_for_a_step_would_wait_for_them_too() -> None:
    assert exposed_s(0.4, 4.0, 4, behind_s=3.0) == pytest.approx(3.1)
    assert exposed_s(0.0, 4.0, 4, behind_s=3.0) == 0.0, "a step that loads nothing"
    assert between_s(0.5, 1.0, others=3, behind_s=0.9) == 2.0, "by the end of the step at hand the link is free"
    assert between_s(0.5, 1.0, others=3, behind_s=2.5) == 3.0
    assert between_s(2.5, 1.0, others=0, behind_s=1.5) == 4.0
    assert choose(1.0, others=18)
    assert not choose(1.0, others=18, behind_s=0.5)
