"""Loads within a step, whatever happens: what was not loaded is computed again, and so is all that came of it.

The rig's own walks, with loads between steps, are in `test_tier_stateful`.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

from tests.extent import quick
from tests.support.audit import AuditError
from vllm_ext.config.errors import ConfigError
from vllm_ext.kv.connector.tiered import TieredConnector

from .step_loads_rig import StepRig
from .tier_stateful_driver import STEPS_PER_ENGINE, Walked, draw_setup, live
from .tier_stateful_rig import MIN_BLOCKS, Setup

STEPS = quick(4_000, full=12_000)


def quiet(**options: object) -> StepRig:
    """An engine whose copies take no time, and load within the step."""
    return StepRig(
        Setup(**{"slow": 0.0, "num_blocks": 2 * MIN_BLOCKS, "host_chunks": 30, "load": "in-step", **options})  # type: ignore[arg-type]
    )


def on_the_host_only(rig: StepRig, prompt: range) -> None:
    """Compute a prompt, and let the device forget it."""
    rig.add(prompt, 1)
    while rig.loop.has_work:
        rig.step()
    assert rig.reset(running=False, connector=False)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_computes_in_the_step_that_loads(asynchronous: bool) -> None:
    rig = quiet(async_scheduling=asynchronous)
    on_the_host_only(rig, range(100, 120))
    rig.add(range(100, 123), 3)
    rig.step()
    assert rig.scheduler.requests["r1"].num_computed_tokens == 23
    assert (rig.copies.step_loads, rig.copies.loaded) == (1, 5)
    rig.drain()
    assert len(rig.loop.outcomes["r1"].token_ids) == 3
    assert rig.num_preemptions == 0


def test_the_block_of_the_last_token_is_not_loaded_but_computed() -> None:
    """All 20 tokens are on the host; with all of them there would be nothing to compute."""
    rig = quiet()
    on_the_host_only(rig, range(100, 120))
    rig.add(range(100, 120), 3)
    rig.step()
    assert rig.copies.loaded == 4
    rig.drain()


@pytest.mark.parametrize(("first", "makes_way", "in_step"), [(52, False, 0), (52, True, 1), (8, False, 2)])
def test_no_step_waits_behind_a_long_load_that_nobody_waits_for(first: int, makes_way: bool, in_step: int) -> None:
    """A block takes as long as a step: 13 are loaded between steps, 2 within one unless they are behind the 13."""
    rig = quiet(load="auto")
    on_the_host_only(rig, range(100, 100 + first + 1))
    on_the_host_only(rig, range(200, 209))
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
    on_the_host_only(rig, range(100, 104))
    rig.add(range(100, 104), 3)
    rig.drain()
    assert rig.copies.step_loads == 0
    assert rig.auditor.checked_jobs > 1


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("store", ["early", "ahead"])
def test_what_a_failed_load_did_not_bring_is_computed_again(asynchronous: bool, store: str) -> None:
    """And so is what twins in the same step, and the next step of an asynchronous engine, made of it."""
    rig = quiet(async_scheduling=asynchronous, store=store)
    on_the_host_only(rig, range(100, 120))
    rig.copies.fail_loads(1.0)
    for _ in range(3):
        rig.add([*range(100, 120), 7], 4)
    rig.step()
    rig.copies.fail_loads(0.0)
    while rig.loop.has_work:
        rig.step()
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
    on_the_host_only(rig, range(100, 120))
    prompt = [*range(100, 120), *range(7, 14)]
    rig.copies.fail_loads(1.0)
    rig.add(prompt, 6)
    rig.step()
    rig.copies.fail_loads(0.0)
    rig.abort("r1", while_executing=while_executing)
    while rig.loop.has_work:
        rig.step()
    assert rig.copies.failed_step_loads == 1
    for _ in range(2):  # the first one stores again what the load found unreadable, and the second finds all
        assert rig.reset(running=False, connector=False)
        rig.add(prompt, 3)
        while rig.loop.has_work:
            rig.step()
    assert rig.copies.step_loads == 2
    rig.drain()


@pytest.mark.parametrize("load", ["in-step", "auto"])
def test_a_walk_through_all_that_can_happen(load: str) -> None:
    dice, seen, engine = random.Random(17), Walked(), 0
    loads = failed = spoilt = 0
    while seen.steps < STEPS:
        setup = draw_setup(dice, engine, load=load, failing_loads=dice.choice([0.0, 0.1, 0.5]))
        rig = StepRig(setup)
        try:
            live(rig, dice, STEPS_PER_ENGINE // 2, seen)
        except Exception as error:
            error.add_note(f"engine {engine}: {setup}")
            raise
        engine += 1
        loads += rig.copies.step_loads
        failed += rig.copies.failed_step_loads
        spoilt += rig.auditor.spoilt_requests
    assert loads > failed > 0
    assert spoilt > 0
    assert seen.aborts
    assert seen.resets
    assert seen.preemptions


@pytest.mark.parametrize("asynchronous", [False, True])
def test_without_taking_back_the_walk_finds_what_was_made_of_a_failed_load(
    monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """The control: leave it to vLLM, and requests read what was never loaded."""
    monkeypatch.setattr("vllm_ext.scheduling.scheduler.discard_failed_loads", lambda *args: None)
    dice = random.Random(17)

    def walk() -> None:
        for engine in range(20):
            rig = StepRig(draw_setup(dice, engine, load="in-step", failing_loads=0.5, async_scheduling=asynchronous))
            live(rig, dice, STEPS_PER_ENGINE // 2, Walked())

    with pytest.raises(AuditError):  # KV of another prefix is read; or what comes of it is seen first
        walk()
