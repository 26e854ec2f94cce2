"""What is in the tier, where copies fail."""

from __future__ import annotations

import random

import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext

from vllm_ext.config.kv_tier import POLICIES as POLICY_NAMES
from vllm_ext.kv.host.manager import TierManager

from .disk_parts import key

POLICIES = pytest.mark.parametrize("policy", POLICY_NAMES)
REQUEST = ReqContext(req_id="r")


def keys(*numbers: int) -> list[OffloadKey]:
    return [key(number) for number in numbers]


def begin_store(manager: TierManager, *numbers: int) -> list[int]:
    """Prepare a store of chunks that are not there yet; returns their places."""
    output = manager.prepare_store(keys(*numbers), REQUEST)
    assert output is not None
    assert output.keys_to_store == keys(*numbers)
    return output.store_spec.block_ids.tolist()  # type: ignore[attr-defined,no-any-return]


def tier(policy: str, *stored: int, num_chunks: int = 4) -> tuple[TierManager, dict[int, int]]:
    """A tier with chunks, and their places."""
    manager = TierManager(num_chunks, cache_policy=policy)
    places = dict(zip(stored, begin_store(manager, *stored), strict=True))
    manager.complete_store(keys(*stored), REQUEST)
    return manager, places


def found(manager: TierManager, *numbers: int) -> list[bool]:
    return [manager.lookup(key(number), REQUEST) is LookupResult.HIT for number in numbers]


@POLICIES
def test_a_chunk_that_could_not_be_read_goes_when_nobody_reads_it(policy: str) -> None:
    manager, places = tier(policy, 1, 2)
    manager.prepare_load(keys(1, 2), REQUEST)
    manager.prepare_load(keys(2), REQUEST)
    manager.mark_unreadable([places[2]])
    manager.complete_load(keys(1, 2), REQUEST)
    assert manager.prepare_store(keys(5, 6, 7, 8), REQUEST) is None, "its place is not given away while it is read"
    manager.complete_load(keys(2), REQUEST)
    assert found(manager, 1, 2) == [True, False]
    begin_store(manager, 5, 6, 7, 8)


@POLICIES
def test_a_reset_forgets_everything(policy: str) -> None:
    manager, places = tier(policy, 1, 2)
    manager.mark_unreadable([places[1]])
    manager.reset_cache()
    assert found(manager, 1, 2) == [False, False]
    assert sorted(begin_store(manager, 1, 2, 3, 4)) == [0, 1, 2, 3]
    manager.complete_store(keys(1, 2, 3, 4), REQUEST)
    assert found(manager, 1, 2, 3, 4) == [True] * 4, "what was unreadable before says nothing of what is there now"


@POLICIES
@pytest.mark.parametrize("seed", range(5))
def test_no_place_is_lost_or_used_twice(policy: str, seed: int) -> None:
    """Random stores and loads, of which some fail, against a plain record of who is where."""
    rng = random.Random(seed)
    manager = TierManager(8, cache_policy=policy)
    stores: list[dict[int, int]] = []
    loads: list[list[int]] = []
    for _ in range(2000):
        choice = rng.random()
        numbers = rng.sample(range(24), rng.randint(1, 4))
        if choice < 0.4:
            before = found(manager, *range(24))
            output = manager.prepare_store(keys(*numbers), REQUEST)
            assert output is not None or found(manager, *range(24)) == before, "what does not fit evicts nothing"
            if output is not None and output.keys_to_store:
                by_key = {key(number): number for number in numbers}
                chosen = [by_key[stored] for stored in output.keys_to_store]
                places = output.store_spec.block_ids.tolist()  # type: ignore[attr-defined]
                stores.append(dict(zip(chosen, places, strict=True)))
        elif choice < 0.6 and stores:
            store = stores.pop(rng.randrange(len(stores)))
            bad = [number for number in store if rng.random() < 0.2]
            manager.mark_unreadable(store[number] for number in bad)
            manager.complete_store(keys(*store), REQUEST)
            assert found(manager, *store) == [number not in bad for number in store]
        elif choice < 0.8:
            there = [number for number in numbers if found(manager, number)[0]]
            if there:
                manager.prepare_load(keys(*there), REQUEST)
                loads.append(there)
        elif loads:
            load = loads.pop(rng.randrange(len(loads)))
            for number in load:
                chunk = manager._policy.get(key(number))
                if rng.random() < 0.2:
                    manager.mark_unreadable([chunk.chunk_id])
            manager.complete_load(keys(*load), REQUEST)
        held = [chunk.chunk_id for n in range(24) if (chunk := manager._policy.get(key(n))) is not None]
        assert len(held) == len(set(held))
        assert len(held) + manager._get_num_free_chunks() == 8
    assert manager.dropped_chunks > 20
