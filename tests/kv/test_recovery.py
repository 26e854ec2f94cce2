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


class Engine:
    """Who holds which blocks, and who loads."""

    def __init__(self, held: dict[str, list[int]], loading: list[str]) -> None:
        self.held = held
        self.requests: dict[str, Any] = {name: self._request(name) for name in held}
        self.kv_holding_waiting = [self.requests[name] for name in loading]
        self.kv_cache_manager = SimpleNamespace(
            get_block_ids=lambda name: (self.held.get(name, []),),
            free=lambda request: self.held.pop(request.request_id),
        )
        self.failed_recving_kv_req_ids: set[str] = set()
        self._inflight_prefills: set[Any] = set()

    @staticmethod
    def _request(name: str) -> Any:
        return Waiting(
            request_id=name,
            status=RequestStatus.WAITING_FOR_REMOTE_KVS,
            num_computed_tokens=9,
            is_finished=lambda: False,
        )


class Tier:
    """Loads within a step, and what was discarded."""

    def __init__(self, step_loads: frozenset[int] = frozenset()) -> None:
        self.discarded: dict[str, frozenset[int]] = {}
        self.blocks_of_step_loads = step_loads
        self.awaited: list[str] = []
        self.jobs = self

    def wait_for_loads(self, req_ids: Any) -> None:
        self.awaited += req_ids


@pytest.fixture
def discarded() -> tuple[Engine, Tier]:
    engine, tier = Engine({"gone": [1, 2, 3], "runs": [7]}, ["gone"]), Tier()
    discard_loads(engine, tier)
    assert tier.awaited == ["gone"]
    return engine, tier


def test_whoever_has_the_blocks_by_now_is_not_told_that_they_were_not_filled(discarded: tuple[Engine, Tier]) -> None:
    engine, tier = discarded
    engine.held["runs"] += [1, 2]
    report = KVConnectorOutput(invalid_block_ids={1, 2, 3, 7}, finished_recving={"gone"})
    overlook_discarded(engine, tier, report)
    assert report.invalid_block_ids == {7}, "what others failed to fill stays"
    later = KVConnectorOutput(invalid_block_ids={1})
    overlook_discarded(engine, tier, later)
    assert later.invalid_block_ids == {1}, "the load was reported: this is another one"


def test_until_a_load_is_reported_nothing_of_it_counts(discarded: tuple[Engine, Tier]) -> None:
    engine, tier = discarded
    for invalid in ({1}, {2}):  # of one worker after another
        report = KVConnectorOutput(invalid_block_ids=invalid)
        overlook_discarded(engine, tier, report)
        assert report.invalid_block_ids == set()
    del engine.requests["gone"]
    overlook_discarded(engine, tier, KVConnectorOutput())
    assert tier.discarded == {}


def test_blocks_that_are_loaded_into_again_may_have_failed_again(discarded: tuple[Engine, Tier]) -> None:
    engine, tier = discarded
    engine.held["next"] = [2]
    engine.kv_holding_waiting = [SimpleNamespace(request_id="next")]
    tier.blocks_of_step_loads = frozenset({3})
    report = KVConnectorOutput(invalid_block_ids={1, 2, 3})
    overlook_discarded(engine, tier, report)
    assert report.invalid_block_ids == {2, 3}
