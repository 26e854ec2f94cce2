"""What is reported of loads that a reset discarded: their blocks may be others' by then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from vllm_ext.kv.connector.recovery import discard_loads, overlook_discarded


class Waiting(SimpleNamespace):
    """A request."""

    __hash__ = object.__hash__


@pytest.fixture
def discarded() -> tuple[Any, Any]:
    """An engine that let go of a load into blocks 1 to 3 while somebody else holds block 7, and the tier's books."""
    held, awaited = {"gone": [1, 2, 3], "runs": [7]}, list[str]()
    waiting = {"status": RequestStatus.WAITING_FOR_REMOTE_KVS, "num_computed_tokens": 9, "is_finished": lambda: False}
    requests = {name: Waiting(request_id=name, **waiting) for name in held}
    engine: Any = SimpleNamespace(
        held=held,
        requests=requests,
        kv_holding_waiting=[requests["gone"]],
        kv_cache_manager=SimpleNamespace(
            get_block_ids=lambda name: (held.get(name, []),), free=lambda request: held.pop(request.request_id)
        ),
        failed_recving_kv_req_ids=set(),
        _inflight_prefills=set(),
    )
    jobs = SimpleNamespace(wait_for_loads=awaited.extend)
    tier: Any = SimpleNamespace(discarded={}, blocks_of_step_loads=frozenset(), jobs=jobs)
    discard_loads(engine, tier)
    assert awaited == ["gone"]
    return engine, tier


def test_whoever_has_the_blocks_by_now_is_not_told_that_they_were_not_filled(discarded: tuple[Any, Any]) -> None:
    engine, tier = discarded
    engine.held["runs"] += [1, 2]
    report = KVConnectorOutput(invalid_block_ids={1, 2, 3, 7}, finished_recving={"gone"})
    overlook_discarded(engine, tier, report)
    assert report.invalid_block_ids == {7}, "what others failed to fill stays"
    later = KVConnectorOutput(invalid_block_ids={1})
    overlook_discarded(engine, tier, later)
    assert later.invalid_block_ids == {1}, "the load was reported: this is another one"


def test_until_a_load_is_reported_nothing_of_it_counts(discarded: tuple[Any, Any]) -> None:
    engine, tier = discarded
    for invalid in ({1}, {2}):  # of one worker after another
        report = KVConnectorOutput(invalid_block_ids=invalid)
        overlook_discarded(engine, tier, report)
        assert report.invalid_block_ids == set()
    del engine.requests["gone"]
    overlook_discarded(engine, tier, KVConnectorOutput())
    assert tier.discarded == {}


def test_blocks_that_are_loaded_into_again_may_have_failed_again(discarded: tuple[Any, Any]) -> None:
    engine, tier = discarded
    engine.held["next"] = [2]
    engine.kv_holding_waiting = [SimpleNamespace(request_id="next")]
    tier.blocks_of_step_loads = frozenset({3})
    report = KVConnectorOutput(invalid_block_ids={1, 2, 3})
    overlook_discarded(engine, tier, report)
    assert report.invalid_block_ids == {2, 3}
