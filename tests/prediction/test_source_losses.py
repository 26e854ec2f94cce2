"""Whom to believe: who was nearer lately, and nobody before enough was seen."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.random import default_rng

from vllm_ext.contract.length_distribution import LengthDistribution
from vllm_ext.prediction import source_losses
from vllm_ext.prediction.source_losses import LEVELS, SourceLosses


def test_the_nearer_source_is_known_after_enough_requests() -> None:
    losses = SourceLosses()
    for _ in range(source_losses._ENOUGH - 1):
        losses.observe({"near": (90, 150), "far": (10, 20)}, 100)
    assert losses.is_nearer("near", "far") is None
    losses.observe({"near": (90, 150), "far": (10, 20)}, 100)
    assert losses.is_nearer("near", "far") is True
    assert losses.is_nearer("far", "near") is False
    assert losses.is_nearer("near", "unknown") is None


def test_an_answer_of_one_alone_is_not_judged() -> None:
    losses = SourceLosses()
    for _ in range(200):
        losses.observe({"near": (100, 100)}, 100)
    assert losses.is_nearer("near", "far") is None


def test_who_gets_better_is_believed_before_long() -> None:
    losses = SourceLosses()
    for _ in range(5000):
        losses.observe({"was right": (100, 100), "learns": (10, 10)}, 100)
    for _ in range(2 * source_losses._REMEMBERED):
        losses.observe({"was right": (10, 10), "learns": (100, 100)}, 100)
    assert losses.is_nearer("learns", "was right") is True


@pytest.mark.parametrize("wrong", [0.5, 2.0])
def test_true_quantiles_have_the_least_loss(wrong: float) -> None:
    lengths = np.maximum(1, default_rng(0).lognormal(5, 1, 1000).astype(int))
    true = tuple(map(LengthDistribution.of(lengths).quantile, LEVELS))
    off = tuple(max(1, round(wrong * one)) for one in true)
    losses = SourceLosses()
    for length in lengths:
        losses.observe({"true": true, "wrong": off}, int(length))
    assert losses.is_nearer("true", "wrong") is True
