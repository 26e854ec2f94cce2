"""Engines with a host tier, for its tests. A block is 16 tokens of OPT-13B: 13,107,200 bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_ext.simulation.collector import Collector
from vllm_ext.simulation.cost.spec import CostSpec, HardwareSpec
from vllm_ext.simulation.harness import block_hasher
from vllm_ext.simulation.request_factory import RequestFactory
from vllm_ext.simulation.requests import SimRequest
from vllm_ext.simulation.run import build_scheduler, reads_truth
from vllm_ext.simulation.simulated_engine import SimulatedEngine
from vllm_ext.simulation.spec import KvOffloadSpec, RecordSpec
from vllm_ext.simulation.tier import Tier, build_tier
from vllm_ext.simulation.tier_audit import TransferAuditor

from .parts import ListWorkload, PerTokenCost, SteadyCost, ask, engine_spec

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


def serve(
    workload: Iterable[SimRequest] | ListWorkload,
    cost: Cost | None = None,
    *,
    num_blocks: int = 14,
    blocks_per_s: float = 2000.0,
    kv_offload: KvOffloadSpec | None = None,
    run: bool = True,
    **options: Any,
) -> Server:
    """Serve a workload on an engine whose tier is audited; ``blocks_per_s``: of the link, in one direction."""
    spec = engine_spec(**{"prefix_caching": True, "kv_offload": kv_offload, **options})
    scheduler = build_scheduler(spec, num_blocks, HARDWARE)
    collector = Collector(scheduler, RecordSpec(token_times=True))
    link = CostSpec(kind="constant", pcie_bytes_per_s=blocks_per_s * BLOCK_BYTES, copy_overhead_s=0.0)
    tier = None if kv_offload is None else build_tier(scheduler, HARDWARE, link)
    if tier is not None and kv_offload is not None:
        tier.copies.auditor = TransferAuditor(scheduler, kv_offload.blocks_per_chunk)
        collector.tier = tier
    engine = SimulatedEngine(
        scheduler,
        workload if isinstance(workload, ListWorkload) else ListWorkload(list(workload)),
        cost or PerTokenCost(),
        collector,
        depth=2 if spec.async_scheduling else 1,
        make_request=RequestFactory(
            max_model_len=spec.max_model_len,
            hasher=block_hasher(spec.block_size),
            reveal_lengths=reads_truth(spec),
        ),
        tier=tier,
    )
    engine.decisions = []
    if run:
        engine.run()
    return Server(engine, scheduler, collector, tier)


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
