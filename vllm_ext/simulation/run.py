"""One simulation, from its description to what it measured."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_ext import systems
from vllm_ext.config import parse
from vllm_ext.scheduling.scheduler import SteeredScheduler
from vllm_ext.simulation.cost.profiled import runtime_model
from vllm_ext.simulation.cost.spec import build as build_cost
from vllm_ext.simulation.cost.step_shape import CostModel
from vllm_ext.simulation.engine.cohort import Cohort, with_cohort
from vllm_ext.simulation.engine.harness import SAME_NAMES, block_hasher, make_scheduler
from vllm_ext.simulation.engine.request_factory import RequestFactory
from vllm_ext.simulation.engine.simulated_engine import SimulatedEngine
from vllm_ext.simulation.engine.tier import TIER_KEY, build_tier, connector_options
from vllm_ext.simulation.measure.collector import Collector
from vllm_ext.simulation.measure.run_data import RunData
from vllm_ext.simulation.spec import UPSTREAM, Resolved, SimulationSpec, resolve
from vllm_ext.simulation.workloads.build import build as build_workload
from vllm_ext.simulation.workloads.requests import Workload
from vllm_ext.step_time.runtime import DEFAULT_TILE_TOKENS, RuntimeModel

_TOTALS = ("steps", "empty_steps", "contended_steps", "prefill_tokens", "decode_tokens", "preemptions")
Progress = Callable[[float, int], None]
"""Called with the virtual time in seconds and the number of requests that ended."""


def simulate(
    spec: SimulationSpec,
    *,
    workload: Workload | None = None,
    cost: CostModel | None = None,
    progress: Progress | None = None,
) -> RunData:
    """Run a simulation.

    Args:
        spec: Describes it.
        workload: Takes the place of the one described.
        cost: Likewise.
        progress: Told how far it has come.

    Raises:
        ValueError: (ConfigError included) the description asks for what can't be; the message names field and value.
        Stalled: the scheduler stopped scheduling with requests left.
    """
    if spec.replicas > 1:
        raise ValueError(f"replicas={spec.replicas!r}: must be 1 here; simulation.cluster serves by several engines")
    resolved = resolve(spec)
    workload = workload or build_workload(spec.workload)
    cost = cost or build_cost(resolved.hardware, spec.cost)
    with rare_collections():
        return _run(in_milliseconds(resolved, cost), workload, cost, progress)  # nothing here holds on to what it made


def _run(resolved: Resolved, workload: Workload, cost: CostModel, progress: Progress | None) -> RunData:
    started = time.perf_counter()
    engine = make_engine(resolved, build_scheduler(resolved), workload, cost, progress=progress)
    collector = engine.collector
    with quiet_vllm():  # a connector would warn of each chunk that does not fit
        engine.run(resolved.spec.max_time_s)
    if progress is not None:
        progress(engine.clock(), len(collector.table))
    return run_data(engine, resolved, wall_s=time.perf_counter() - started)


def run_data(engine: SimulatedEngine, resolved: Resolved, *, wall_s: float) -> RunData:
    """Return what an engine leaves behind that has run."""
    collector = engine.collector
    return RunData(
        label=resolved.spec.engine.system,
        requests=collector.table,
        unserved=collector.unserved,
        gaps=collector.gaps,
        series=collector.series,
        events=collector.events,
        decisions=engine.decisions,
        counters=_counters(engine, resolved.num_blocks),
        duration_s=engine.clock(),
        wall_s=wall_s,
    )


def make_engine(
    resolved: Resolved, scheduler: Scheduler, workload: Workload, cost: CostModel, *, progress: Progress | None = None
) -> SimulatedEngine:
    """Return an engine around a scheduler that `build_scheduler` built, which has not run yet.

    Raises:
        ValueError: a profile is asked for and named too, or the engine is too small for one.
    """
    spec, device = resolved.spec, resolved.hardware.device
    collector = Collector(scheduler, spec.record)
    if scheduler.connector is not None:
        with quiet_vllm():
            collector.tier = build_tier(scheduler, resolved)
    # As in vLLM's engine core: a connector finds KV by the blocks' hashes too.
    hashes = spec.engine.prefix_caching or collector.tier is not None
    factory = RequestFactory(
        max_model_len=resolved.limits.max_model_len,
        hasher=block_hasher(spec.engine.block_size) if hashes else None,
        reveal_lengths=resolved.reads_truth,
        can_hide=isinstance(scheduler, Cohort),
    )
    if isinstance(scheduler, SteeredScheduler):
        if scheduler.holding is not None:
            scheduler.holding.price(device.memory_bytes_per_s * device.memory_efficiency)
        if spec.engine.profiled:
            if (named := spec.engine.options.get("profile")) is not None:
                raise ValueError(
                    f"profiled=True: must be left out, or options.profile={named!r}; a model starts from one"
                )
            scheduler.observer.start_from(_profiled(resolved, cost))
    made = SimulatedEngine(scheduler, workload, cost, collector, make_request=factory, on_progress=progress)
    if spec.record.decisions:
        made.decisions = []
    return made


def in_milliseconds(resolved: Resolved, cost: CostModel) -> Resolved:
    """Return a description whose objectives are milliseconds, where a profile of the hardware can tell them.

    Without one the scheduler's own model tells them, or refuses them.
    """
    engine = resolved.spec.engine
    if not engine.profiled:
        return resolved
    given = parse({"slo": engine.options.get("slo", {})}).slo
    with quiet_vllm():
        slo = systems.in_milliseconds(given, lambda: _profiled(resolved, cost))
    if slo == given:
        return resolved
    options = {**engine.options, "slo": slo.model_dump(mode="json")}
    spec = resolved.spec.model_copy(update={"engine": engine.model_copy(update={"options": options})})
    return replace(resolved, spec=spec)


def _profiled(resolved: Resolved, cost: CostModel) -> RuntimeModel:
    tile = resolved.hardware.device.tile_tokens if resolved.spec.cost.kind == "roofline" else DEFAULT_TILE_TOKENS
    return runtime_model(cost, resolved.limits, tile)


def build_scheduler(resolved: Resolved) -> Scheduler:
    """Build the scheduler that an engine would have; it stands on a `Cohort`, if it can and need not be exact.

    Raises:
        ValueError: (ConfigError included) vLLM or the system refuses a setting.
    """
    engine, system = resolved.spec.engine, resolved.system
    options = dict(engine.options)
    if system is not None:
        options |= {"system": engine.system, **({"allow_oracle": True} if system.oracle else {})}
    elif options:
        raise ValueError(f"options={options!r}: must be empty for {engine.system}, which is vLLM alone")
    connector = connector_options(resolved, options)
    scheduler_cls = AsyncScheduler if system is None else SteeredScheduler
    # KV on the device in 8 bits: which of it a step reads must be known of every request.
    exact = resolved.spec.exact or (options.get(TIER_KEY) or {}).get("device_int8_share")
    with quiet_vllm():
        return make_scheduler(
            scheduler_cls if exact else with_cohort(scheduler_cls),
            num_blocks=resolved.num_blocks,
            enable_prefix_caching=engine.prefix_caching,
            additional_config=None if system is None else {"vllm_ext": options},
            scheduling_policy=UPSTREAM.get(engine.system, engine.scheduling_policy),
            log_stats=False,
            **(engine.model_dump(include=SAME_NAMES) | resolved.limits._asdict()),
            **connector,
        )


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
    if isinstance(engine.scheduler, SteeredScheduler):
        counters = engine.scheduler.observer.counters
        found |= {"policy_fallbacks": counters.fallbacks, "demotions": counters.demotions}
        if (shadow := engine.scheduler.observer.shadow) is not None:
            shadow.catch_up()
            found["shadow_requests"] = shadow.compared.requests
            for order, waits in (("real", shadow.compared.real), ("shadow", shadow.compared.shadow)):
                found[f"shadow_wait_s_{order}"] = waits.total_s
                found[f"shadow_longest_wait_s_{order}"] = waits.longest_s
    return {name: float(value) for name, value in found.items()}


@contextlib.contextmanager
def quiet_vllm() -> Iterator[None]:
    """vLLM describes each configuration it builds; a sweep builds hundreds."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
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
