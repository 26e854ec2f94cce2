"""Objectives of a request: whose word counts, TTFT by prompt length, and what options are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vllm_ext import config
from vllm_ext.config import FLAGS, ConfigError, SloConfig, flags, merge_flags, parse
from vllm_ext.contract.objective import NO_SLO, Slo, resolve
from vllm_ext.hints import NO_HINTS, RequestHints


def slo(**options: Any) -> SloConfig:
    return parse({"slo": options}).slo


def test_without_options_and_hints_there_are_no_objectives() -> None:
    assert resolve(NO_HINTS, 100, slo()) is NO_SLO


def test_the_request_wins_over_its_class_and_that_over_the_defaults() -> None:
    options = slo(ttft_ms=1, tbt_ms=2, jct_ms=3, classes={"gold": {"ttft_ms": 10, "tbt_ms": 20}})
    hints = RequestHints(tag="gold", ttft_slo_ms=100)
    assert resolve(hints, 5, options) == Slo(ttft_s=0.1, tbt_s=0.02, e2e_s=0.003)


@pytest.mark.parametrize("tag", [None, "silver"])
def test_a_tag_that_names_no_class_gets_the_defaults(tag: str | None) -> None:
    options = slo(jct_ms=3000, classes={"gold": {"jct_ms": 1000}})
    assert resolve(RequestHints(tag=tag), 5, options) == Slo(e2e_s=3.0)


def test_a_class_alone_gives_nobody_else_objectives() -> None:
    options = slo(classes={"gold": {"tbt_ms": 50}})
    assert resolve(RequestHints(tag="gold"), 5, options) == Slo(tbt_s=0.05)
    assert resolve(NO_HINTS, 5, options) is NO_SLO


BUCKETS = {1: 100, 512: 100, 513: 300, 1024: 300, 1025: 450, 1536: 450, 2048: 600, 5120: 1500}


@pytest.mark.parametrize(("tokens", "expected_ms"), BUCKETS.items())
def test_ttft_goes_by_the_prompt_in_buckets_of_512_tokens_and_in_proportion_beyond(
    tokens: int, expected_ms: float
) -> None:
    assert resolve(NO_HINTS, tokens, slo(ttft_bucket_ms=[100, 300])).ttft_s == pytest.approx(expected_ms / 1000)


def test_an_empty_prompt_belongs_to_the_first_bucket() -> None:
    assert slo(ttft_bucket_ms=[100, 300]).ttft_of(0) in (100, 300)


def test_a_class_may_have_one_objective_where_the_defaults_have_buckets() -> None:
    options = slo(ttft_bucket_ms=[100, 300], classes={"gold": {"ttft_ms": 50}})
    assert resolve(RequestHints(tag="gold"), 600, options).ttft_s == 0.05


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "zero": ({"ttft_ms": 0}, r"slo\.ttft_ms=0: must be greater than 0"),
    "negative": ({"tbt_ms": -1}, r"slo\.tbt_ms=-1"),
    "text": ({"jct_ms": "5"}, r"slo\.jct_ms='5'"),
    "true": ({"jct_ms": True}, r"slo\.jct_ms=True"),
    "not a number": ({"jct_ms": math.nan}, r"slo\.jct_ms=nan"),
    "infinite": ({"jct_ms": math.inf}, r"slo\.jct_ms=inf"),
    "one bucket is no list": ({"ttft_bucket_ms": 5}, r"slo\.ttft_bucket_ms=5: must be a list"),
    "a bucket of zero": ({"ttft_bucket_ms": [5, 0]}, r"slo\.ttft_bucket_ms=0"),
    "buckets beside one for all": ({"ttft_bucket_ms": [5], "ttft_ms": 5}, "must not be given beside ttft_ms"),
    "no such option": ({"ttft": 5}, r"slo\.ttft=5: unknown option; the options here are .*ttft_ms.*classes.*shed"),
    "no object": ({"classes": {"gold": 5}}, r"slo\.classes\.gold=5: must be an object"),
    "classes are no object": ({"classes": [1]}, r"slo\.classes=\[1\]: must be an object"),
    "a class without a name": ({"classes": {"": {}}}, "not empty"),
    "a class with too long a name": ({"classes": {"x" * 65: {}}}, "at most 64 characters"),
    "too many classes": ({"classes": {str(i): {} for i in range(65)}}, "must have at most 64 items"),
    "wrong within a class": ({"classes": {"gold": {"tbt_ms": 0}}}, r"tbt_ms=0"),
    "no such option of a class": ({"classes": {"gold": {"shed": True}}}, r"slo\.classes\.gold\.shed=True: unknown"),
    "shed is no boolean": ({"shed": 1}, r"slo\.shed=1"),
    "no times at all": ({"tbt_ms": "0x"}, r"slo\.tbt_ms='0x': must be a number of milliseconds greater than 0, or"),
    "a negative multiple": ({"tbt_ms": "-5x"}, r"slo\.tbt_ms='-5x': must be"),
    "infinite times": ({"tbt_ms": "9" * 400 + "x"}, r"slo\.tbt_ms='999"),
    "milliseconds as text": ({"tbt_ms": "5"}, r"slo\.tbt_ms='5': must be"),
    "nothing before the x": ({"classes": {"gold": {"tbt_ms": "x"}}}, r"slo\.classes\.gold\.tbt_ms='x': must be"),
    "a multiple with an exponent": ({"tbt_ms": "1e3x"}, r"slo\.tbt_ms='1e3x': must be"),
    "a gap that is true": ({"tbt_ms": True}, r"slo\.tbt_ms=True: must be"),
    "an infinite gap": ({"tbt_ms": math.inf}, r"slo\.tbt_ms=inf: must be"),
    "a multiple of something else": ({"ttft_ms": "5x"}, r"slo\.ttft_ms='5x': must be a number"),
    "margin of zero": ({"shed_margin": 0}, r"slo\.shed_margin=0: must be greater than 0"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_wrong_option_is_refused_by_its_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        slo(**options)


def test_options_are_the_same_after_the_way_through_json() -> None:
    options = {"ttft_bucket_ms": [100, 300], "shed": True, "classes": {"gold": {"tbt_ms": 50}}}
    parsed = parse({"slo": options})
    assert parse(config.to_dict(parsed)) == parsed


@pytest.mark.parametrize("given", ["5x", "25x", "2.5x", ".5x", 100.0, 100])
def test_a_gap_may_be_a_multiple(given: str | float) -> None:
    parsed = parse({"slo": {"tbt_ms": given, "classes": {"gold": {"tbt_ms": given}}}})
    assert parsed.slo.tbt_ms == parsed.slo.classes["gold"].tbt_ms == given
    assert type(parsed.slo.tbt_ms) is (str if isinstance(given, str) else float)
    assert parse(config.to_dict(parsed)) == parsed


def test_a_multiple_is_no_objective_of_a_request() -> None:
    """Whoever starts an engine turns it into milliseconds: `vllm_ext.systems.in_milliseconds`."""
    with pytest.raises(ValueError, match="5x"):
        resolve(NO_HINTS, 5, slo(tbt_ms="5x"))


def test_the_flags_set_the_options() -> None:
    given = {"tbt_slo_ms": 50.0, "ttft_slo_bucket_ms": [100.0, 300.0], "jct_slo_ms": 9000.0, "ext_shed": True}
    assert given.keys() <= {flags.dest_of(path) for path in FLAGS}
    found = parse(merge_flags({"slo": {"tbt_ms": 1}}, given)).slo
    assert (found.tbt_ms, found.ttft_bucket_ms, found.jct_ms, found.shed) == (50.0, (100.0, 300.0), 9000.0, True)


@pytest.mark.parametrize("name", ["ttft_s", "tbt_s", "e2e_s"])
def test_an_objective_is_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0"):
        Slo(**{name: 0.0})
