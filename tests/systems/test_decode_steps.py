"""Objectives as multiples of a decode step: what they come to, and that nothing else is touched."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from vllm_ext.config import ConfigError, parse
from vllm_ext.step_time.runtime import Coefficients, RuntimeModel
from vllm_ext.systems import in_milliseconds
from vllm_ext.systems.sarathi import decode_steps_ms

STARTED = RuntimeModel(Coefficients(1e-3, 2e-5, 3e-5, 4e-8, 5e-10))
"""1 ms, 32 decodes of 20 us, 131,072 tokens of context at 40 ns: a step takes 6.88288 ms."""


def never() -> RuntimeModel:
    raise AssertionError("nothing is a multiple")


@pytest.mark.parametrize(("times", "expected_ms"), [(1, 6.88), (5, 34.4), (25, 172.0), (2.5, 17.2), (1000, 6880.0)])
def test_a_decode_step_is_of_32_decodes_with_4096_tokens_each(times: float, expected_ms: float) -> None:
    assert decode_steps_ms(times, STARTED) == expected_ms


def test_defaults_and_classes_get_milliseconds_and_keep_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("vllm.vllm_ext.slo")  # vLLM's loggers do not propagate once vLLM is imported
    logger.addHandler(caplog.handler)
    options: dict[str, Any] = {
        "tbt_ms": "5x",
        "ttft_bucket_ms": [100, 300],
        "least_tbt_ms": 2,
        "classes": {"fast": {"tbt_ms": "2.5x", "jct_ms": 9}, "slow": {"tbt_ms": 500}, "none": {"ttft_ms": 7}},
    }
    try:
        with caplog.at_level(logging.INFO, logger=logger.name):
            found = in_milliseconds(parse({"slo": options}).slo, lambda: STARTED)
    finally:
        logger.removeHandler(caplog.handler)
    fast = {"fast": {"tbt_ms": 17.2, "jct_ms": 9}}
    assert found == parse({"slo": {**options, "tbt_ms": 34.4, "classes": {**options["classes"], **fast}}}).slo
    assert [record.getMessage() for record in dict.fromkeys(caplog.records)] == [
        "slo.classes.fast.tbt_ms=2.5x is 17.2 ms, by the runtime model",
        "slo.tbt_ms=5x is 34.4 ms, by the runtime model",
    ]


def test_milliseconds_stay_as_they_are_and_no_model_is_asked_for() -> None:
    given = parse({"slo": {"tbt_ms": 61.25, "jct_ms": 5, "classes": {"gold": {"tbt_ms": 1e-3}, "none": {}}}}).slo
    assert in_milliseconds(given, never) == given
    assert in_milliseconds(given) == given


def test_all_multiples_are_of_one_model() -> None:
    asked: list[int] = []

    def runtime() -> RuntimeModel:
        asked.append(1)
        return STARTED

    in_milliseconds(parse({"slo": {"tbt_ms": "5x", "classes": {"fast": {"tbt_ms": "1x"}}}}).slo, runtime)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("times", "model"), [("9" * 308 + "x", STARTED), ("5x", RuntimeModel(Coefficients(*[0.0] * 5)))]
)
def test_what_comes_to_nothing_or_to_no_number_is_refused_where_it_was_given(times: str, model: RuntimeModel) -> None:
    slo = parse({"slo": {"classes": {"gold": {"tbt_ms": times}}}}).slo
    with pytest.raises(ConfigError, match=r"slo\.classes\.gold\.tbt_ms='[95]+(x')?: needs measured step times"):
        in_milliseconds(slo, lambda: model)


@pytest.mark.parametrize("options", [{"slo": {"tbt_ms": 10**400}}, {"kv_tier": {"gib": 10**400}}])
def test_a_number_beyond_all_floats_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"must be a number of"):
        parse(options)


@pytest.mark.parametrize("where", ["slo", "slo.classes.gold"])
def test_a_model_that_learns_while_serving_can_tell_no_step(where: str) -> None:
    options = {"tbt_ms": "5x"} if where == "slo" else {"classes": {"gold": {"tbt_ms": "5x"}}}
    with pytest.raises(ConfigError) as caught:
        in_milliseconds(parse({"slo": options}).slo, RuntimeModel)
    assert str(caught.value).startswith(
        f"vllm_ext.{where}.tbt_ms='5x': needs measured step times: run `vllm-ext profile`"
    )
    assert "\n" not in str(caught.value)
