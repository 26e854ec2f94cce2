"""How far clients are believed: as far as each was right, and a new name is worth nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.contract import Origin
from vllm_ext.prediction import hint_weights
from vllm_ext.prediction.hint_weights import HintWeights

ALICE, BOB = Origin(tag="alice"), Origin(tag="bob")


def after(*seen: tuple[Origin, int, int]) -> HintWeights:
    weights = HintWeights()
    for client, osl, length in seen:
        weights.observe(client, osl, length)
    return weights


def test_everybody_is_believed_by_half_at_first() -> None:
    assert HintWeights().weight(ALICE) == 0.5


def test_who_was_right_is_believed_and_who_was_wrong_is_not() -> None:
    seen = [*[(ALICE, 100, 100)] * 100, *[(BOB, 1, 100)] * 100]
    random.Random(0).shuffle(seen)
    weights = after(*seen)
    assert weights.weight(ALICE) > 0.9
    assert weights.weight(BOB) < 0.1


@pytest.mark.parametrize(("times", "worth"), [(1.0, 1.0), (1.3, 0.87), (2.0, 0.38), (0.5, 0.38), (5.0, 0.01)])
def test_a_hint_counts_by_how_near_it_was(times: float, worth: float) -> None:
    weights = after(*[(ALICE, 100, round(100 * times))] * 1000)
    assert weights.weight(ALICE) == pytest.approx(worth, abs=0.03)


def test_short_answers_foretold_do_not_pay_for_a_long_one_denied() -> None:
    """Ninety of a hundred hints are exact; what they are about is a tenth of what is generated."""
    weights = after(*[*[(ALICE, 5, 5)] * 9, (ALICE, 5, 400)] * 20)
    assert weights.weight(ALICE) < 0.2


def test_a_name_of_its_own_for_each_request_buys_no_credit() -> None:
    weights = after(*[(Origin(tag=str(number)), 1, 100) for number in range(200)])
    assert weights.weight(Origin(tag="another")) < 0.1


def test_a_newcomer_among_liars_earns_its_credit() -> None:
    weights = after(*[(Origin(tag=str(number)), 1, 100) for number in range(200)], *[(ALICE, 200, 200)] * 20)
    assert weights.weight(ALICE) > 0.8


def test_old_clients_do_not_speak_for_new_ones() -> None:
    """What is known of newcomers is of their first tokens only: one big liar does not spoil it for ever."""
    seen = [(BOB, 1, 100)] * 1000 + [(Origin(tag=str(number)), 100, 100) for number in range(20)]
    assert after(*seen).weight(ALICE) > 0.6


def test_a_client_may_mend_its_ways() -> None:
    weights = after(*[(ALICE, 1, 100)] * 10_000)
    assert weights.weight(ALICE) < 0.02
    for _ in range(1000):
        weights.observe(ALICE, 100, 100)
    assert weights.weight(ALICE) > 0.8


def test_key_salt_and_tag_tell_clients_apart() -> None:
    weights = after(*[(Origin(tag="app", key="one"), 1, 100)] * 100)
    assert weights.weight(Origin(tag="app", key="one")) < weights.weight(Origin(tag="app", key="two"))


def test_only_so_many_clients_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hint_weights, "_MAX_CLIENTS", 3)
    weights = after(*[(Origin(tag=str(number)), 100, 100) for number in range(50)])
    assert len(weights._clients) == 3


@given(st.lists(st.tuples(st.sampled_from([ALICE, BOB]), st.integers(1, 10**6), st.integers(1, 10**6)), max_size=50))
def test_a_weight_is_a_probability(seen: list[tuple[Origin, int, int]]) -> None:
    weights = after(*seen)
    for client in (ALICE, BOB, Origin()):
        assert 0 <= weights.weight(client) <= 1
