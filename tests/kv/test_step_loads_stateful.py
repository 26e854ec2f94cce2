"""Loads within a step: what was not loaded is computed again, and so is all that came of it.

Walks over them are in `test_tier_stateful`, and that those find what is not taken back in its controls.
"""

from __future__ import annotations

import dataclasses

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

from tests.support.tier_rig import TierRig
from tests.support.tier_rig import quiet as quiet_rig
from vllm_ext.config.errors import ConfigError
from vllm_ext.kv.connector.tiered import TieredConnector
from vllm_ext.simulation.cost.link import Direction


def quiet(**options: object) -> TierRig:
    return quiet_rig(**{"load": "in-step", **options})


def fail_loads(rig: TierRig, share: float) -> None:
    rig.copies.failing[Direction.TO_DEVICE] = share


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_computes_in_the_step_that_loads(asynchronous: bool) -> None:
    rig = quiet(async_scheduling=asynchronous)
    rig.leave_on_host(range(100, 120))
    rig.add(range(100, 123), 3)
    rig.step()
    assert rig.scheduler.requests["r1"].num_computed_tokens == 23
    assert (rig.copies.step_loads, rig.copies.loaded_in_steps) == (1, 5)
    rig.drain()
    assert len(rig.loop.outcomes["r1"].token_ids) == 3
    assert rig.num_preemptions == 0


def test_the_block_of_the_last_token_is_not_loaded_but_computed() -> None:
    """All 20 tokens are on the host; with all of them there would be nothing to compute."""
    rig = quiet()
    rig.leave_on_host(range(100, 120))
    rig.add(range(100, 120), 3)
    rig.step()
    assert rig.copies.loaded_in_steps == 4
    rig.drain()


@pytest.mark.parametrize(("first", "makes_way", "in_step"), [(52, False, 0), (52, True, 1), (8, False, 2)])
def test_no_step_waits_behind_a_long_load_that_nobody_waits_for(first: int, makes_way: bool, in_step: int) -> None:
    """A block takes as long as a step: 13 are loaded between steps, 2 within one unless they are behind the 13."""
    rig = quiet(load="auto")
    rig.leave_on_host(range(100, 100 + first + 1))
    rig.leave_on_host(range(200, 209))
    rig.side.load_in_steps(step_s=lambda: 1.0, num_running=lambda: 1)
    rig.side.prices.takes_cycles = makes_way
    rig.side.prices.back.observe(1000 * rig.side.prices._chunk_bytes, 1000.0)
    for start, num_tokens in ((100, first), (200, 8)):
        rig.add(range(start, start + num_tokens + 1), 3)
        rig.step()
    rig.drain()
    assert rig.copies.step_loads == in_step


@pytest.mark.parametrize("position", [0, 1])
def test_beside_layers_that_are_not_offloaded_loads_are_between_steps(position: int) -> None:
    """A load that failed would be told neither by its blocks nor by its request; and a group has blocks of its own."""
    rig = quiet()
    scheduler, (group,) = rig.scheduler, rig.scheduler.kv_cache_config.kv_cache_groups
    groups = [group]
    groups.insert(position, dataclasses.replace(group, layer_names=["other"], enable_kv_transfer=False))
    config = dataclasses.replace(scheduler.kv_cache_config, kv_cache_groups=groups)
    with pytest.raises(ConfigError, match=r"kv_tier\.load='in-step': needs full attention in one group of layers"):
        TieredConnector(scheduler.vllm_config, KVConnectorRole.SCHEDULER, config)


def test_what_has_a_single_block_is_loaded_between_steps() -> None:
    rig = quiet()
    rig.leave_on_host(range(100, 104))
    rig.add(range(100, 104), 3)
    rig.drain()
    assert rig.copies.step_loads == 0
    assert rig.auditor.checked_jobs > 1


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("store", ["early", "ahead"])
def test_what_a_failed_load_did_not_bring_is_computed_again(asynchronous: bool, store: str) -> None:
    """And so is what twins in the same step, and the next step of an asynchronous engine, made of it."""
    rig = quiet(async_scheduling=asynchronous, store=store)
    rig.leave_on_host(range(100, 120))
    fail_loads(rig, 1.0)
    for _ in range(3):
        rig.add([*range(100, 120), 7], 4)
    rig.step()
    fail_loads(rig, 0.0)
    rig.settle()
    assert rig.copies.failed_step_loads == (store != "ahead"), "ahead copies nothing as long as there is room"
    assert rig.num_preemptions == 3 * rig.copies.failed_step_loads
    assert [len(rig.loop.outcomes[f"r{number}"].token_ids) for number in (1, 2, 3)] == [4, 4, 4]
    rig.drain()


@pytest.mark.parametrize("while_executing", [False, True])
def test_nothing_is_kept_of_who_was_aborted_before_the_failure_was_known(while_executing: bool) -> None:
    """Found by the walk: who is aborted is stored with the next step, which may be scheduled when the failure is known.

    By then it is none of those that run, and its copy is not among the stores to let go of.
    """
    rig = quiet(async_scheduling=True, store="early")
    rig.leave_on_host(range(100, 120))
    prompt = [*range(100, 120), *range(7, 14)]
    fail_loads(rig, 1.0)
    rig.add(prompt, 6)
    rig.step()
    fail_loads(rig, 0.0)
    rig.abort("r1", while_executing=while_executing)
    rig.settle()
    assert rig.copies.failed_step_loads == 1
    for _ in range(2):  # the first one stores again what the load found unreadable, and the second finds all
        assert rig.reset(running=False, connector=False)
        rig.add(prompt, 3)
        rig.settle()
    assert rig.copies.step_loads == 2
    rig.drain()
