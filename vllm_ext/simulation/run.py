"""One simulation, from its description to what it measured."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_ext.scheduling.scheduler import SteeredScheduler
from vllm_ext.simulation.cohort import Cohort, with_cohort
from vllm_ext.simulation.collector import Collector
from vllm_ext.simulation.cost.profiled import runtime_model
from vllm_ext.simulation.cost.spec import HardwareSpec
from vllm_ext.simulation.cost.spec import build as build_cost
from vllm_ext.simulation.decision import Decision
from vllm_ext.simulation.harness import SAME_NAMES, block_hasher, make_scheduler
from vllm_ext.simulation.limits import Limits
from vllm_ext.simulation.request_factory import RequestFactory
from vllm_ext.simulation.requests import Workload
from vllm_ext.simulation.run_data import RunData
from vllm_ext.simulation.simulated_engine import SimulatedEngine
from vllm_ext.simulation.spec import (
    UPSTREAM,
    EngineSpec,
    SimulationSpec,
    check_context,
    engine_blocks,
    limits_of,
)
from vllm_ext.simulation.steered import steered
from vllm_ext.simulation.step_shape import CostModel
from vllm_ext.simulation.tier import TIER_KEY, build_tier, connector_options
from vllm_ext.simulation.workloads.build import build as build_workload
from vllm_ext.step_time.runtime import DEFAULT_TILE_TOKENS
from vllm_ext.systems import resolve

_TOTALS = ("steps", "empty_steps", "contended_steps", "prefill_tokens", "decode_tokens", "preemptions")
Progress = Callable[[float, int], None]
"""Called with the virtual time in seconds and the number of requests that ended."""


def simulate(spec: SimulationSpec, *, progress: Progress | None = None) -> RunData:
    """Run a simulation.

    Raises:
        ValueError: (ConfigError included) the description asks for what can't be; the message names field and value.
        Stalled: the scheduler stopped scheduling with requests left.
    """
    num_blocks = engine_blocks(spec)
    return simulate_parts(
        spec,
        workload=build_workload(spec.workload),
        cost=build_cost(spec.hardware, spec.cost),
        num_blocks=num_blocks,
        progress=progress,
    )[0]


def simulate_parts(
    spec: SimulationSpec,
    *,
    workload: Workload,
    cost: CostModel,
    num_blocks: int,
    progress: Progress | None = None,
) -> tuple[RunData, list[Decision] | None]:
    """Run a simulation with a workload and a cost model that are at hand; ``spec`` says the rest.

    Returns:
        The data of the run, and the decisions of every step if ``spec.record.decisions``.
    """
    with _rare_collections():
        return _run(spec, workload, cost, num_blocks, progress)  # nothing here holds on to what it made


def _run(
    spec: SimulationSpec, workload: Workload, cost: CostModel, num_blocks: int, progress: Progress | None
) -> tuple[RunData, list[Decision] | None]:
    started = time.perf_counter()
    scheduler = build_scheduler(spec.engine, num_blocks, spec.hardware, exact=spec.exact)
    if spec.engine.profiled:
        roofline = spec.cost.kind == "roofline"
        tile = spec.hardware.resolve_device().tile_tokens if roofline else DEFAULT_TILE_TOKENS
        start_from_profile(scheduler, spec.engine, cost, limits_of(spec.engine, spec.hardware), tile)
    engine = make_engine(spec, scheduler, workload, cost, progress=progress)
    collector = engine.collector
    with _quiet_vllm():  # a connector would warn of each chunk that does not fit
        engine.run(spec.max_time_s)
    if progress is not None:
        progress(engine.clock(), len(collector.table))
    data = RunData(
        label=spec.engine.system,
        requests=collector.table,
        unserved=collector.unserved,
        gaps=collector.gaps,
        series=collector.series,
        events=collector.events,
        counters=_counters(engine, num_blocks),
        duration_s=engine.clock(),
        wall_s=time.perf_counter() - started,
    )
    return data, engine.decisions


def make_engine(
    spec: SimulationSpec, scheduler: Scheduler, workload: Workload, cost: CostModel, *, progress: Progress | None = None
) -> SimulatedEngine:
    """Return an engine around a scheduler that `build_scheduler` built, which has not run yet."""
    engine = spec.engine
    collector = Collector(scheduler, spec.record)
    if scheduler.connector is not None:
        with _quiet_vllm():
            collector.tier = build_tier(scheduler, spec.hardware, spec.cost)
    # As in vLLM's engine core: a connector finds KV by the blocks' hashes too.
    hashes = engine.prefix_caching or collector.tier is not None
    factory = RequestFactory(
        max_model_len=limits_of(engine, spec.hardware).max_model_len,
        hasher=block_hasher(engine.block_size) if hashes else None,
        reveal_lengths=reads_truth(engine),
        can_hide=isinstance(scheduler, Cohort),
    )
    ours = steered(scheduler)
    if ours is not None and ours.holding is not None:
        device = spec.hardware.resolve_device()
        ours.holding.price(device.memory_bytes_per_s * device.memory_efficiency)
    made = SimulatedEngine(
        scheduler, workload, cost, collector, make_request=factory, on_progress=progress, tier=collector.tier
    )
    if spec.record.decisions:
        made.decisions = []
    return made


def build_scheduler(
    engine: EngineSpec, num_blocks: int, hardware: HardwareSpec | None = None, *, exact: bool = True
) -> Scheduler:
    """Build the scheduler that an engine with these settings would have.

    Args:
        exact: Tell vLLM's scheduler of every request in every step; else it stands on a `Cohort`, if it can.
        hardware: Says how large a block is, for ``kv_offload`` and the ``kv_tier`` of the options, and the limits that
            the engine leaves open; None: the default's.

    Raises:
        ValueError: (ConfigError included) vLLM or the system refuses a setting, or the KV pool is too small for one
            request of ``max_model_len`` tokens, with which vLLM does not start.
    """
    limits = limits_of(engine, hardware or HardwareSpec())
    check_context(limits, num_blocks, engine.block_size)
    upstream = UPSTREAM.get(engine.system)
    options = dict(engine.options)
    if upstream is None:
        options["system"] = engine.system
        if resolve(engine.system).oracle:
            options["allow_oracle"] = True
    elif options:
        raise ValueError(f"options={options!r}: must be empty for {engine.system}, which is vLLM alone")
    connector = connector_options(engine, hardware, options)
    scheduler_cls = SteeredScheduler if upstream is None else AsyncScheduler
    with _quiet_vllm():
        return make_scheduler(
            scheduler_cls if exact or _has_records(options) else with_cohort(scheduler_cls),
            num_blocks=num_blocks,
            enable_prefix_caching=engine.prefix_caching,
            additional_config=None if upstream is not None else {"vllm_ext": options},
            scheduling_policy=upstream or engine.scheduling_policy,
            log_stats=False,
            **(engine.model_dump(include=SAME_NAMES) | limits._asdict()),
            **connector,
        )


def _has_records(options: Mapping[str, Any]) -> bool:
    """Whether KV stays on the device in 8 bits: which of it a step reads must be known of every request."""
    return bool((options.get(TIER_KEY) or {}).get("device_int8_share"))


def start_from_profile(
    scheduler: Scheduler,
    engine: EngineSpec,
    cost: CostModel,
    limits: Limits,
    tile_tokens: int = DEFAULT_TILE_TOKENS,
) -> None:
    """Give the scheduler the runtime model that a profile of the simulated hardware would; vLLM alone has none.

    Raises:
        ValueError: a profile is named in the options too, or the engine is too small for one.
    """
    if engine.system in UPSTREAM:
        return
    if (named := engine.options.get("profile")) is not None:
        raise ValueError(f"profiled=True: must be left out, or options.profile={named!r}; a model starts from one")
    ours = steered(scheduler)
    assert ours is not None
    ours.observer.start_from(runtime_model(cost, limits, tile_tokens))


def reads_truth(engine: EngineSpec) -> bool:
    """Whether the system reads true output lengths."""
    if engine.system in UPSTREAM:
        return False
    sources = (engine.options.get("prediction") or {}).get("sources") or ()
    return resolve(engine.system).oracle or "oracle" in sources


def _counters(engine: SimulatedEngine, num_blocks: int) -> dict[str, float]:
    collector, duration_s = engine.collector, engine.clock()
    found = {name: getattr(collector, name) for name in _TOTALS} | {
        "rejected_requests": engine.num_rejected,
        "unfinished_requests": len(collector.live),
        "device_busy_s": collector.device_busy_s,
        "num_kv_blocks": num_blocks,
        "max_kv_used_fraction": collector.max_kv_used,
    }
    if duration_s > 0:
        found["mean_running_requests"] = collector.running_area / duration_s
        found["mean_waiting_requests"] = collector.waiting_area / duration_s
        found["mean_kv_used_fraction"] = collector.kv_area / duration_s
    if collector.backlog is not None:
        found.update(collector.backlog.counters())
    if collector.tier is not None:
        found.update(collector.tier.counters(duration_s))
    ours = steered(engine.scheduler)
    if ours is not None:
        found["policy_fallbacks"] = ours.observer.counters.fallbacks
        found["demotions"] = ours.observer.counters.demotions
    return {name: float(value) for name, value in found.items()}


@contextlib.contextmanager
def _quiet_vllm() -> Iterator[None]:
    """vLLM describes each configuration it builds; a sweep builds hundreds."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Look for cycles once, when the run is over: requests form none, but a scheduler and its engine are one.

    Left to Python these stay: compared with all modules that are loaded they are few, and a sweep's runs add up to
    gigabytes. What is older than the run is not looked at, which makes it cheap.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(200_000, 50, 100)
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
        gc.set_threshold(*thresholds)
