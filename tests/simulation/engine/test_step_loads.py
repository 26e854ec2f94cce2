"""Loads within a step, and gaps that are computed again, in virtual time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.support.audit import AuditError
from tests.support.simulation_parts import SteadyCost, rows
from tests.support.tier_parts import Server, conversation, drained, own_tier, serve
from vllm_ext.kv.connector.scheduler import TierScheduler
from vllm_ext.kv.partial_prefix.search import GapCounts

_DEPTHS = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
_LAYERS = 40
"""Of OPT-13B."""


def turn_2(server: Server) -> dict[str, Any]:
    return rows(server.collector.table)["turn-2"]


# --- the pipeline ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks_per_s", [5.0, 40.0, 4e5], ids=["copy", "both", "computation"])
def test_the_step_takes_as_long_as_the_slower_of_its_copies_and_its_computation(blocks_per_s: float) -> None:
    """80 tokens come back; the first layer waits for a 40th of them, and a 40th is computed behind the last copy."""
    compute_s = 0.1
    options = own_tier(store="early", load="in-step")
    server = drained(
        serve(conversation(), SteadyCost(device=compute_s), system="fcfs", options=options, blocks_per_s=blocks_per_s)
    )
    copy_s = 5 / blocks_per_s
    longer_s = max(copy_s / _LAYERS, copy_s - compute_s * (_LAYERS - 1) / _LAYERS)
    assert turn_2(server)["cached_prompt_tokens"] == server.counters["tier_hit_tokens"] == 80
    assert server.counters["transfer_exposed_s"] == pytest.approx(longer_s)
    assert turn_2(server)["first_token_s"] - turn_2(server)["arrival_s"] == pytest.approx(compute_s + longer_s)


@_DEPTHS
def test_a_load_within_the_step_saves_the_wait_for_another(async_scheduling: bool) -> None:
    def wait_s(load: str) -> float:
        options = own_tier(store="early", load=load)
        settings = {"system": "fcfs", "options": options, "async_scheduling": async_scheduling, "blocks_per_s": 100.0}
        turn = turn_2(drained(serve(conversation(), SteadyCost(device=0.1), **settings)))
        return float(turn["first_token_s"] - turn["arrival_s"])

    assert wait_s("in-step") < wait_s("between")


# --- gaps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("async_scheduling", "chunks"), [(False, 16), (True, 21)])
@pytest.mark.parametrize("system", ["pensieve-published", "pensieve-published-turns"])
def test_a_dropped_beginning_is_computed_with_the_new_prompt(system: str, async_scheduling: bool, chunks: int) -> None:
    """The tier has lost the first of the five chunks that turn 1 had; what it still holds is not computed again."""
    kept, options = 64, own_tier(chunks)
    server = drained(serve(conversation(), system=system, options=options, async_scheduling=async_scheduling))
    gaps = server.scheduler.gaps
    assert gaps is not None
    assert gaps.counts == GapCounts(
        tokens_loaded=kept, tokens_computed=16, tokens_missing=16, requests_by_gaps=Counter({1: 1})
    )
    assert (gaps.counts.requests, gaps.counts.gaps) == (1, 1)
    assert turn_2(server)["cached_prompt_tokens"] == server.counters["tier_hit_tokens"] == kept
    assert server.collector.prefill_tokens == 64 + 4 * 90 + (81 + 20 - kept)


@pytest.mark.parametrize(("system", "loaded", "computed"), [("pensieve", 80, None), ("pensieve-published", 64, 16)])
def test_as_published_everything_is_stored_and_loaded_over_a_slow_link_too(
    system: str, loaded: int, computed: int | None
) -> None:
    """A block takes an eighth of a second over the link, and far less to compute: copies of the others do not pay.

    Without them all of turn 1 stays in the tier. With them its first chunk is dropped, and the rest is loaded.
    """
    options = own_tier(14)
    server = drained(serve(conversation(60.0), system=system, options=options, blocks_per_s=8.0))
    gaps = server.scheduler.gaps
    assert server.counters["tier_hit_tokens"] == loaded
    assert (None if gaps is None else gaps.counts.tokens_computed) == computed
    assert server.collector.prefill_tokens == 64 + 4 * 90 + (81 + 20 - loaded)


def test_kv_that_was_not_loaded_into_a_gap_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check that the tests above rely on."""
    monkeypatch.setattr(TierScheduler, "_load_in_step", lambda *_: None)
    with pytest.raises(AuditError, match="turn-2 reads block"):
        serve(conversation(), system="pensieve-published", options=own_tier(15))
