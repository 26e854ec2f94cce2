"""Counters of objectives: tiers stay few, outcomes begin at 0, and attainment is a ratio of what is counted.

The metrics live in the registry of the process; each test uses a model name of its own, and sees only its own samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY

from vllm_ext.slo import metrics as slo_metrics
from vllm_ext.slo.metrics import MAX_TAGS, OTHER, SloMetrics

_numbers = itertools.count()


@pytest.fixture
def model() -> str:
    return f"slo-model-{next(_numbers)}"


@pytest.fixture(autouse=True)
def tags() -> Iterator[None]:
    """The tags of a process; other tests must not have used them up."""
    tags = slo_metrics._metrics().tags
    before = set(tags)
    tags.clear()
    yield
    tags.clear()
    tags.update(before)


def sample(model: str, name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"vllm_ext:slo_{name}_total", {"model_name": model, **labels})


def test_a_class_is_a_tier_and_so_is_a_client_s_tag(model: str) -> None:
    metrics = SloMetrics(model, ["gold"])
    assert [metrics.tier(tag) for tag in (None, "gold", "shop")] == ["", "gold", "shop"]


def test_a_client_can_not_make_ever_more_tiers(model: str) -> None:
    metrics = SloMetrics(model, ["gold"])
    tiers = [metrics.tier(f"tag-{i}") for i in range(MAX_TAGS + 5)]
    assert tiers[:MAX_TAGS] == [f"tag-{i}" for i in range(MAX_TAGS)]
    assert set(tiers[MAX_TAGS:]) == {OTHER}
    assert metrics.tier("tag-3") == "tag-3", "those known stay known"
    assert metrics.tier("gold") == "gold", "classes take no place"
    assert SloMetrics(model).tier("yet another") == OTHER, "the bound is one of the process"


def test_a_request_counts_for_each_objective_and_for_all_of_them(model: str) -> None:
    metrics = SloMetrics(model)
    metrics.count("shop", {"ttft": "met", "jct": "missed"}, "missed", 12)
    metrics.count("shop", {"ttft": "met", "jct": "met"}, "met", 30)
    found = {
        (objective, outcome): sample(model, "requests", tier="shop", objective=objective, outcome=outcome)
        for objective in ("ttft", "jct", "all")
        for outcome in ("met", "missed", "aborted")
    }
    assert found == {
        ("ttft", "met"): 2,
        ("ttft", "missed"): 0,
        ("ttft", "aborted"): 0,
        ("jct", "met"): 1,
        ("jct", "missed"): 1,
        ("jct", "aborted"): 0,
        ("all", "met"): 1,
        ("all", "missed"): 1,
        ("all", "aborted"): 0,
    }
    assert sample(model, "requests", tier="shop", objective="tbt", outcome="met") is None
    assert sample(model, "output_tokens", tier="shop", outcome="met") == 30
    assert sample(model, "output_tokens", tier="shop", outcome="missed") == 12
    assert sample(model, "output_tokens", tier="shop", outcome="aborted") == 0


def test_refusals_are_counted_by_tier(model: str) -> None:
    metrics = SloMetrics(model)
    metrics.shed("shop")
    metrics.shed("shop")
    metrics.shed("")
    assert sample(model, "shed_requests", tier="shop") == 2
    assert sample(model, "shed_requests", tier="") == 1
