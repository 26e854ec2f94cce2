"""Invariants 4 and 10: drafts that are accepted, and rejected, under preemption and admissions by name.

The model repeats itself often enough for n-grams to draft what it says next. KV blocks and seats are few. The reference
is vLLM's own scheduler with room for everything and without drafts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import repeating_model
from engines import BASE_ENGINE, TIGHT, Engines, Outcome, long_then_short
from test_e2e_systems import NGRAM, PATIENT, SLOS, SYSTEMS

from tests.support.extent import with_full

pytestmark = pytest.mark.e2e

COVERING = ("alise", "auto", "accelgen")
ARRIVALS = long_then_short(seed=5, num_long=6, num_short=8, long_tokens=120, short_tokens=12)
DRAFTING: Mapping[str, Any] = {"speculative_config": NGRAM}


@pytest.fixture(scope="module")
def model(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repeating_model.build(llama, tmp_path_factory.mktemp("repeating"))


def run(run_engines: Engines, model: Path, **engine: Any) -> Outcome:
    settings = {**BASE_ENGINE, "model": str(model), **engine}
    return run_engines([{"name": "drafts", "engine": settings, "arrivals": ARRIVALS}])["drafts"]


@pytest.fixture(scope="module")
def upstream(run_engines: Engines, model: Path) -> Outcome:
    return run(run_engines, model)


@pytest.mark.parametrize("system", with_full(COVERING, SYSTEMS))
def test_4_and_10_accepted_drafts_give_upstreams_tokens(
    system: str, run_engines: Engines, model: Path, upstream: Outcome
) -> None:
    ours = {"slo": SLOS, "prediction": {"sources": ["hint", "history"]}}
    steered = {"scheduler_cls": system, "additional_config": {"vllm_ext": ours}}
    found = run(run_engines, model, **TIGHT, **DRAFTING, **steered)
    assert found.tokens == upstream.tokens
    assert found.finish_reasons == upstream.finish_reasons
    assert (found.blocks_missing, found.left_running, found.left_waiting, found.fallbacks) == (0, 0, 0, 0)
    assert found.accepted_tokens > sum(map(len, found.tokens.values())) / 4
    assert found.accepted_tokens < 0.9 * NGRAM["num_speculative_tokens"] * found.drafts, "hardly any was rejected"
    assert (found.preemptions == 0) == (system in PATIENT)


def test_what_comes_next_depends_on_more_than_the_last_token(upstream: Outcome) -> None:
    """Equality would mean little if the model said the same whatever its KV holds."""
    followers = defaultdict(set)
    for tokens in upstream.tokens.values():
        for token, follower in pairwise(tokens):
            followers[token].add(follower)
    assert sum(len(found) > 1 for found in followers.values()) > len(followers) / 3
