"""Estimates: rounding and bounds, and that nothing here drags in what the scheduler must not import."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.extent import HANG_S
from vllm_ext.prediction.estimate import DECODER, PRIOR, Estimate, bounded

MODULES = ("estimate", "retrieval", "decoder", "decoder_file", "decoder_train", "lognormal", "blend")
HEAVY = ("torch", "faiss", "sentence_transformers", "transformers", "safetensors", "scipy", "vllm")


@given(
    tokens=st.floats(-1e9, 1e9),
    p90=st.floats(-1e9, 1e9),
    max_tokens=st.integers(1, 10**6),
    generated=st.integers(0, 10**6),
)
def test_quantiles_ascend_within_their_bounds(tokens: float, p90: float, max_tokens: int, generated: int) -> None:
    e = bounded(tokens, p90, DECODER, max_tokens, generated=generated)
    assert generated < e.tokens <= e.p90 <= max(max_tokens, generated + 1)


def test_tokens_are_rounded_and_p90_is_rounded_up() -> None:
    assert bounded(10.4, 20.1, PRIOR, 100) == Estimate(10, 21, "prior")
    assert bounded(10.6, 20.0, PRIOR, 100)[:2] == (11, 20)
    assert bounded(0.2, 0.3, PRIOR, 100)[:2] == (1, 1)


@pytest.mark.parametrize("tokens", [1, 10, 37, 1000, 99_999])
def test_a_whole_p90_survives_the_way_over_its_logarithm(tokens: int) -> None:
    assert bounded(1, math.exp(math.log(tokens)), PRIOR, 10**6).p90 == tokens


def test_a_p90_below_the_tokens_is_raised() -> None:
    assert bounded(50, 5, PRIOR, 100)[:2] == (50, 50)


def test_a_request_at_its_bound_still_gets_one_more_token() -> None:
    assert bounded(5, 6, PRIOR, 8, generated=8)[:2] == (9, 9)


def test_estimates_without_similarity_are_equal() -> None:
    assert bounded(5, 6, PRIOR, 8) == bounded(5, 6, PRIOR, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((math.nan, 5.0, PRIOR, 8), "tokens=nan"),
        ((5.0, math.inf, PRIOR, 8), "p90=inf"),
        ((5.0, 5.0, PRIOR, 0), "max_tokens=0: must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[float, float, str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bounded(*arguments)
    with pytest.raises(ValueError, match="generated=-1"):
        bounded(1, 1, PRIOR, 8, generated=-1)


@pytest.mark.parametrize("module", MODULES)
def test_importing_needs_numpy_at_most(module: str) -> None:
    program = (
        f"import vllm_ext.prediction.{module}, sys, json; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=HANG_S)
    assert json.loads(result.stdout) == []
