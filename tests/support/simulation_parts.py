"""Small workloads, cost models and engines for tests of the simulator's core.

Times are made of halves and quarters of a second, which floats hold exactly: expected times are compared with ``==``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_ext.simulation import run
from vllm_ext.simulation.cost.step_shape import StepShape
from vllm_ext.simulation.engine.simulated_engine import SimulatedEngine
from vllm_ext.simulation.measure.run_data import Decision, RequestTable, RunData
from vllm_ext.simulation.run import build_scheduler
from vllm_ext.simulation.spec import EngineSpec, RecordSpec, SimulationSpec, resolve
from vllm_ext.simulation.workloads.requests import SimRequest

NUM_BLOCKS = 64
BLOCK_SIZE = 16

FollowUps = Callable[[SimRequest, float, Sequence[int]], Iterable[SimRequest]]


@dataclass(frozen=True, kw_only=True)
class SteadyCost:
    """Every step takes the same."""

    device: float = 1.0
    host: float = 0.0

    def device_s(self, shape: StepShape) -> float:
        return self.device

    def host_s(self, shape: StepShape) -> float:
        return self.host


@dataclass(frozen=True, kw_only=True)
class PerTokenCost:
    """Steps that differ, so that a decision at another moment shows."""

    def device_s(self, shape: StepShape) -> float:
        return 2.0**-6 + shape.num_tokens * 2.0**-10 + shape.decode_context_tokens * 2.0**-14

    def host_s(self, shape: StepShape) -> float:
        return 2.0**-8 + shape.num_requests * 2.0**-12


@dataclass
class ListWorkload:
    """Given requests, and what follows on each."""

    requests: Iterable[SimRequest]
    follow_ups: FollowUps = lambda request, finished_s, output_ids: ()
    ended: list[tuple[str, float, list[int]]] = field(default_factory=list)
    """What `after` was told: id, moment, tokens."""

    name: str = "list"
    rows: int = 0
    sha256: str = ""

    def start(self) -> Iterator[SimRequest]:
        return iter(self.requests)

    def after(self, request: SimRequest, finished_s: float, output_ids: Sequence[int]) -> Iterable[SimRequest]:
        self.ended.append((request.req_id, finished_s, list(output_ids)))
        return self.follow_ups(request, finished_s, output_ids)


def ask(req_id: str, arrival_s: float = 0.0, prompt: int = 10, output: int = 3, **options: Any) -> SimRequest:
    """A request; its bound is far above its length unless ``max_tokens`` is given."""
    options.setdefault("max_tokens", 64)
    return SimRequest(req_id=req_id, arrival_s=arrival_s, prompt_tokens=prompt, output_tokens=output, **options)


def engine_spec(**options: Any) -> EngineSpec:
    """A small engine: vLLM alone, synchronous, without prefix caching."""
    small = {
        "system": "upstream-fcfs",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 160,
        "block_size": BLOCK_SIZE,
        "prefix_caching": False,
        "async_scheduling": False,
    }
    return EngineSpec(**{**small, **options})


def make_engine(
    workload: Iterable[SimRequest] | ListWorkload,
    cost: SteadyCost | PerTokenCost | None = None,
    *,
    num_blocks: int = NUM_BLOCKS,
    events: int = 0,
    backlog: bool = False,
    exact: bool = True,
    **options: Any,
) -> SimulatedEngine:
    """An engine that has not run yet, with everything recorded; its parts are at hand for audits."""
    spec = SimulationSpec(
        engine=engine_spec(num_blocks=num_blocks, **options),
        record=RecordSpec(token_times=True, events=events, backlog=backlog, decisions=True),
        exact=exact,
    )
    resolved = resolve(spec)
    return run.make_engine(resolved, build_scheduler(resolved), as_workload(workload), cost or SteadyCost())


def as_workload(workload: Iterable[SimRequest] | ListWorkload) -> ListWorkload:
    return workload if isinstance(workload, ListWorkload) else ListWorkload(list(workload))


def simulate(
    workload: Iterable[SimRequest] | ListWorkload,
    cost: SteadyCost | PerTokenCost | None = None,
    *,
    num_blocks: int = NUM_BLOCKS,
    max_time_s: float | None = None,
    record: RecordSpec | None = None,
    **options: Any,
) -> tuple[RunData, list[Decision]]:
    """Run through the public entrance; return the data and the decisions."""
    spec = SimulationSpec(
        engine=engine_spec(num_blocks=num_blocks, **options),
        record=record or RecordSpec(token_times=True, decisions=True),
        max_time_s=max_time_s,
    )
    data = run.simulate(spec, workload=as_workload(workload), cost=cost or SteadyCost())
    return data, data.decisions or []


def rows(table: RequestTable) -> dict[str, dict[str, Any]]:
    """Rows by request id, in the order of their ends."""
    return {row["req_id"]: row for row in table.rows()}


def token_times(table: RequestTable) -> dict[str, list[float]]:
    """Moments of all tokens by request id."""
    return {
        req_id: list(times or ())
        for req_id, times in zip(table.column("req_id").tolist(), table.token_times, strict=True)
    }


def fingerprint(data: RunData, decisions: Sequence[Decision]) -> str:
    """Checksum of all that is deterministic in a run."""
    parts: list[Any] = [vars(decision) for decision in decisions]
    parts += [list(data.requests.rows()), [list(times or ()) for times in data.requests.token_times]]
    parts += [data.counters, data.duration_s, [data.series.column(name).tolist() for name in ("time_s", "running")]]
    parts += [data.gaps.count, data.gaps.total_s, data.gaps.max_s]
    if data.events is not None:
        parts += [[repr(event) for event in data.events.requests], [repr(event) for event in data.events.steps]]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def crowd() -> list[SimRequest]:
    """Eight requests at once that together need more than 13 blocks, with shared prefixes."""
    shared = [1000 + i for i in range(96)]
    found = []
    for i in range(8):
        prompt = 20 + 9 * i
        own = [100 + (37 * i + k) % 800 for k in range(prompt)]
        ids = shared[: 32 * (i % 3)][:prompt]
        ids += own[: prompt - len(ids)]
        found.append(ask(f"r{i}", 0.0, prompt, 5 + 6 * i, max_tokens=40, token_ids=ids))
    return found


def busy_hour() -> list[SimRequest]:
    """Arrivals spread over steps, short and long, hints right and wrong, priorities, aborts."""
    found = []
    for i in range(40):
        output = 1 + 13 * i % 37
        osl = (None, output, 5, 30)[i % 4]
        found.append(
            ask(
                f"r{i}",
                i * 0.03125 + (i % 5) * 0.0078125,
                1 + 37 * i % 110,
                output,
                max_tokens=40,
                extra_args=None if osl is None else {"osl": osl},
                priority=i % 3 - 1,
                abort_after_s=0.25 * (1 + i % 7) if i % 6 == 5 else None,
            )
        )
    return found
