"""Engines with a host tier, for its tests. A block is 16 tokens of OPT-13B: 13,107,200 bytes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.audit import audit_drained
from tests.support.simulation_parts import ListWorkload, PerTokenCost, SteadyCost, as_workload, ask, engine_spec
from tests.support.tier_audit import TransferAuditor
from vllm_ext.simulation.cost.spec import CostSpec, HardwareSpec
from vllm_ext.simulation.engine.simulated_engine import SimulatedEngine
from vllm_ext.simulation.engine.tier import Tier
from vllm_ext.simulation.measure.collector import Collector
from vllm_ext.simulation.run import build_scheduler, make_engine
from vllm_ext.simulation.spec import KvOffloadSpec, RecordSpec, SimulationSpec, resolve
from vllm_ext.simulation.workloads.requests import SimRequest

BLOCK_BYTES = 16 * 819_200
"""16 tokens x 2 (K, V) x 40 layers x 5120 x 2 bytes."""
HARDWARE = HardwareSpec(model="opt-13b", device="a100-40")
"""Its link is replaced: see `blocks_per_s`."""
Cost = PerTokenCost | SteadyCost


@dataclass
class Server:
    """An engine with its parts at hand."""

    engine: SimulatedEngine
    scheduler: Scheduler
    collector: Collector
    tier: Tier | None

    @property
    def counters(self) -> dict[str, float]:
        assert self.tier is not None
        return self.tier.counters(self.engine.clock())

    @property
    def auditor(self) -> Any:
        assert self.tier is not None
        return self.tier.copies.auditor


def offload(blocks: int = 200, **options: Any) -> KvOffloadSpec:
    """Host memory for so many blocks."""
    return KvOffloadSpec(cpu_bytes=blocks * BLOCK_BYTES, **options)


def own_tier(blocks: float = 200, **options: Any) -> dict[str, Any]:
    """Options of vllm_ext: our tier with as much host memory as so many blocks take in 16 bits."""
    return {"kv_tier": {"gib": blocks * BLOCK_BYTES / 2**30, "bits": 16, **options}}


def serve(
    workload: Iterable[SimRequest] | ListWorkload,
    cost: Cost | None = None,
    *,
    num_blocks: int = 14,
    blocks_per_s: float = 2000.0,
    kv_offload: KvOffloadSpec | None = None,
    quantise_blocks_per_s: float | None = None,
    record: RecordSpec | None = None,
    exact: bool = True,
    run: bool = True,
    **options: Any,
) -> Server:
    """Serve a workload on an engine whose tier, if it has one, is audited.

    Args:
        blocks_per_s: Of the link, in one direction.
        quantise_blocks_per_s: See `CostSpec.quantise_bytes_per_s`.
        record: What is kept of the run; by default times of tokens, and decisions.
        exact: See `SimulationSpec.exact`.
        run: Whether to run it.
        options: Of `engine_spec`.
    """
    spec = SimulationSpec(
        engine=engine_spec(**{"prefix_caching": True, "kv_offload": kv_offload, "num_blocks": num_blocks, **options}),
        hardware=HARDWARE,
        exact=exact,
        cost=CostSpec(
            kind="constant",
            pcie_bytes_per_s=blocks_per_s * BLOCK_BYTES,
            copy_overhead_s=0.0,
            quantise_bytes_per_s=None if quantise_blocks_per_s is None else quantise_blocks_per_s * BLOCK_BYTES,
        ),
        record=record or RecordSpec(token_times=True, decisions=True),
    )
    resolved = resolve(spec)
    scheduler = build_scheduler(resolved)
    engine = make_engine(resolved, scheduler, as_workload(workload), cost or PerTokenCost())
    if (tier := engine.collector.tier) is not None:
        tier.copies.auditor = TransferAuditor(scheduler)
    if run:
        engine.run()
    return Server(engine, scheduler, engine.collector, tier)


def ids(start: int, count: int) -> list[int]:
    """Token ids that no other ``start`` (a multiple of 200 apart) shares."""
    return list(range(start, start + count))


def conversation(think_s: float = 4.0) -> ListWorkload:
    """Two turns, and between them others that need the whole pool of 14 blocks.

    Turn 1 is 64 + 17 tokens, of which 80 are computed: 5 blocks. Turn 2 repeats all 81 and adds 20.
    """
    first = ask("turn-1", 0.0, 64, 17, token_ids=ids(200, 64))
    others = [ask(f"other-{i}", 1.0, 90, 4, token_ids=ids(1000 + 200 * i, 90)) for i in range(4)]

    def follow_up(request: SimRequest, finished_s: float, output_ids: Sequence[int]) -> list[SimRequest]:
        if request.req_id != "turn-1":
            return []
        prompt = ids(200, 64) + list(output_ids) + ids(600, 20)
        return [ask("turn-2", finished_s + think_s, len(prompt), 3, token_ids=prompt)]

    return ListWorkload([first, *others], follow_up)


def mixed(dice: random.Random) -> ListWorkload:
    """Sixteen requests of six openings, some with a client that gives up, most with a second turn."""
    starts = [ids(200 + 100 * talk, dice.randint(5, 60)) for talk in range(6)]
    found, now = [], 0.0
    for i in range(16):
        now += dice.choice([0.0, 0.01, 0.02, 0.05, 0.3])
        prompt = (dice.choice(starts) + [dice.randrange(1000, 3000) for _ in range(dice.randint(1, 50))])[:110]
        give_up = dice.choice([None, None, None, dice.random()])
        output = dice.randint(1, 40)
        found.append(ask(f"r{i}", now, len(prompt), output, token_ids=prompt, abort_after_s=give_up, priority=i % 3))

    def follow_up(request: SimRequest, finished_s: float, output_ids: Sequence[int]) -> list[SimRequest]:
        if len(request.req_id) > 4 or not output_ids or request.token_ids is None:
            return []
        prompt = (list(request.token_ids) + list(output_ids) + [200, 201])[:115]
        return [ask(f"{request.req_id}+", finished_s + 0.1, len(prompt), 7, token_ids=prompt)]

    return ListWorkload(found, follow_up)


def drained(server: Server) -> Server:
    """The same server, after checks that nothing is left of requests, blocks and copies."""
    audit_drained(server.scheduler)
    assert server.auditor.open_jobs == 0
    assert server.auditor.checked_jobs > 0
    connector = server.scheduler.connector.connector_scheduler
    assert (connector._jobs, connector._req_status) == ({}, {})
    return server
