"""Recordings made without an engine: of the real scheduler under the real clock, and of a simulated engine."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.distributions import nine
from tests.support.engine_loop import EngineLoop
from tests.support.fake_runner import FakeRunner
from tests.support.preempting import PREEMPTING
from tests.support.simulation_parts import ListWorkload, token_times
from vllm_ext.scheduling.scheduler import SteeredScheduler
from vllm_ext.simulation.cost.step_shape import CostModel
from vllm_ext.simulation.engine.harness import block_hasher, make_request, make_scheduler
from vllm_ext.simulation.recorded import recorder, recording
from vllm_ext.simulation.recorded.recording import Add, ClientRequest, EngineSettings, Header, Step, Update
from vllm_ext.simulation.run import make_engine
from vllm_ext.simulation.spec import EngineSpec, RecordSpec, SimulationSpec, resolve
from vllm_ext.simulation.workloads.requests import SimRequest

SYSTEMS: dict[str, dict[str, Any]] = {
    "upstream-fcfs": {},
    "upstream-priority": {"scheduling_policy": "priority"},
    "fcfs": {"options": {"system": "fcfs"}},
    "alise": {"options": {"system": PREEMPTING, "admission": {"gain_ratio": 1e-9}}},
}
"""Options of each; "alise" is the preempting row of the tests, for anything that ranks better."""

INTAKE_S, DELIVERY_S = 0.003, 0.002
"""What lies between the clients of a simulated engine and its scheduler."""


def recorded_scheduler(system: str, *, depth: int, caching: bool, max_num_seqs: int = 4, num_blocks: int = 24) -> Any:
    arguments = dict(SYSTEMS[system])
    options = arguments.pop("options", None)
    cls: type[Scheduler] = AsyncScheduler if options is None else SteeredScheduler
    return make_scheduler(
        recorder.recorded(cls),
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_model_len=256,
        async_scheduling=depth == 2,
        enable_prefix_caching=caching,
        additional_config={"vllm_ext": options} if options else None,
        **arguments,
    )


def record(
    path: Path, system: str, *, requests: int = 40, depth: int = 1, seed: int = 0, caching: bool = True
) -> recording.Run:
    """Serve requests under the real clock: they compete for blocks and seats, share prefixes, and some leave."""
    scheduler = recorded_scheduler(system, depth=depth, caching=caching)
    _serve(scheduler, random.Random(seed), requests, depth, caching)
    write(path, scheduler, system)
    return recording.read(path)[0]


def write(path: Path, scheduler: Any, system: str, clients: list[ClientRequest] | None = None, repeat: int = 0) -> None:
    """Append what a scheduler recorded."""
    record = scheduler.step_record
    recording.append(path, header(record.settings, system, repeat), lines_of(record), clients or [])


def _serve(scheduler: Any, rng: random.Random, count: int, depth: int, caching: bool) -> None:
    lengths = {f"r{i}-0": rng.randint(1, 40) for i in range(count)}
    runner = FakeRunner(output_lengths=lengths, pipelined=depth == 2, vocab_size=64)
    loop = EngineLoop(scheduler, runner, depth=depth)
    hasher = block_hasher() if caching else None
    for index, req_id in enumerate(lengths):
        own = [rng.randrange(16, 64) for _ in range(rng.randint(1, 60))]
        request = make_request(
            req_id,
            [*range(200, 200 + 16 * rng.randint(0, 2)), *own],
            max_tokens=30,
            extra_args={"osl": rng.randint(1, 40)} if rng.random() < 0.5 else None,
            priority=rng.randint(0, 2),
            hasher=hasher,
            arrival_time=float(index),
        )
        loop.add(request)
        for _ in range(rng.randint(0, 12)):
            loop.step()
        if hasattr(scheduler, "tracked"):  # one of ours: a predictor speaks up, of requests that may have ended
            tokens = rng.randint(1, 40)
            scheduler.update_predictions([[f"r{rng.randint(0, index)}-0", nine(tokens, 2 * tokens), "retrieval"]])
        if index % 9 == 8:
            loop.abort([f"r{index - 1}-0"], while_executing=index % 2 == 0)
        if index == count // 2:
            loop.reset_prefix_cache()
    loop.run_until_idle()


def simulate(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cost: CostModel,
    *,
    system: str = "upstream-fcfs",
    requests: int = 60,
    seed: int = 0,
    depth: int = 1,
    repeat: int = 0,
) -> None:
    """Append a run of a simulated engine whose step times and front end are known exactly."""
    rng = random.Random(seed)
    scheduler = recorded_scheduler(system, depth=depth, caching=True, num_blocks=64)
    moment = 0.0
    asked = []
    for index in range(requests):
        moment += rng.expovariate(20.0)
        prompt = tuple(rng.randrange(100, 4000) for _ in range(rng.randint(4, 80)))
        label = "warmup" if index < 10 else "measured"
        asked.append(
            SimRequest(
                req_id=f"{label}-{index}-0a1b2c3d",
                arrival_s=moment,
                prompt_tokens=len(prompt),
                output_tokens=rng.randint(1, 40),
                max_tokens=50,
                token_ids=prompt,
            )
        )
    spec = SimulationSpec(
        engine=EngineSpec(max_model_len=256, async_scheduling=depth == 2), record=RecordSpec(token_times=True)
    )
    engine = make_engine(resolve(spec), scheduler, ListWorkload(asked), cost)
    with monkeypatch.context() as patched:
        patched.setattr(recorder, "time", SimpleNamespace(monotonic=engine.clock))
        engine.run()
    times = token_times(engine.collector.table)
    clients = [
        ClientRequest(
            system=system,
            load=0.8,
            repeat=repeat,
            req_id=request.req_id.rpartition("-")[0],
            source_id=str(index),
            arrival_s=max(0.0, request.arrival_s - INTAKE_S),
            sent_s=request.arrival_s,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            token_times_s=tuple(t + DELIVERY_S for t in times[request.req_id]),
        )
        for index, request in enumerate(asked)
        if request.req_id.startswith("measured")
    ]
    write(path, scheduler, system, clients, repeat)


@functools.cache
def some_settings() -> dict[str, Any]:
    return recorder.settings(make_scheduler())


def header(settings: dict[str, Any] | None = None, system: str = "alise", repeat: int = 0) -> Header:
    settings = settings or some_settings()
    return Header(
        system=system, load=0.8, repeat=repeat, model="tiny", versions={}, settings=EngineSettings(**settings)
    )


def add(prompt: tuple[int, ...] = (1, 2, 3), at_s: float = 0.25, req_id: str = "a-1") -> Add:
    return Add(
        at_s=at_s, end_s=at_s, clock=(0.25,), req_id=req_id, arrival_time=1e9, prompt=prompt, max_tokens=10, priority=0,
        session_id=None, cache_salt=None, extra_args={"osl": 3}, unsupported=(),
    )  # fmt: skip


def step(number: int, at_s: float, *rows: tuple[str, int, int]) -> Step:
    """Rows are (request, tokens, computed before)."""
    return Step(
        at_s=at_s,
        end_s=at_s + 0.1,
        clock=(),
        step=number,
        throttled=False,
        scheduled=tuple((req_id, tokens) for req_id, tokens, _ in rows),
        computed=tuple(computed for *_, computed in rows),
        new=(),
        resumed=(),
        preempted=(),
    )


def update(number: int, at_s: float, *rows: tuple[str, int], busy: bool = True) -> Update:
    """Rows are (request, tokens sampled)."""
    tokens = tuple((req_id, (7,) * count) for req_id, count in rows)
    return Update(at_s=at_s, end_s=at_s + 0.25, clock=(), step=number, tokens=tokens, finished=(), busy=busy)


def client(req_id: str, arrival_s: float, *times: float) -> ClientRequest:
    return ClientRequest(
        system="alise", load=0.8, repeat=0, req_id=req_id, source_id="", arrival_s=arrival_s, sent_s=arrival_s,
        prompt_tokens=3, output_tokens=len(times), token_times_s=times,
    )  # fmt: skip


def lines_of(record: recorder.StepRecord) -> list[str]:
    """All lines of a record, fetched as a front end does."""
    lines: list[str] = []
    following: int | None = 0
    while following is not None:
        part = record.since(following)
        lines += part["lines"]
        following = part["next"]
    return lines
