"""A steered scheduler on a virtual clock, a scripted system, and a workload to compare outputs on."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.audit import audit
from tests.support.engine_loop import EngineLoop
from tests.support.fake_runner import FakeRunner
from tests.support.preempting import PREEMPTING
from vllm_ext.contract import Admission, Budget, Ordering, Rank, RequestView, Room, Split, Step
from vllm_ext.simulation.engine.events import VirtualClock
from vllm_ext.simulation.engine.harness import block_hasher, make_request, make_scheduler
from vllm_ext.simulation.measure.run_data import Decision
from vllm_ext.step_time.profile import Profile, save
from vllm_ext.systems import System, register
from vllm_ext.systems.upstream import InOrder

STEERED = "vllm_ext.scheduling.scheduler.SteeredScheduler"


Table = list[dict[str, int]]
"""Per step: tokens by request."""


class Script:
    """What the policies of the system ``scripted`` do; a test fills it in, a fixture empties it."""

    rank: Callable[[RequestView, float], Any]
    select: Callable[[Step, Room], None]
    split: Callable[[Step], Split]

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.rank = lambda request, now: Rank(())
        self.select = InOrder().select
        self.split = lambda step: Split()


SCRIPT = Script()


class _Ordering(Ordering):
    def rank(self, request: RequestView, now: float) -> Rank:
        return SCRIPT.rank(request, now)


class _Admission(Admission):
    def select(self, step: Step, room: Room) -> None:
        SCRIPT.select(step, room)


class _Budget(Budget):
    def split(self, step: Step) -> Split:
        return SCRIPT.split(step)


register(System(name="scripted", ordering=_Ordering, admission=_Admission, budget=_Budget))


def save_profile(path: Path, *, step_s: float = 0.01, prefill_token_s: float = 1e-4) -> str:
    """Write a runtime model with a constant step time and a constant price of a prefill token."""
    profile = Profile(
        model="m",
        device="d",
        vllm_version="0",
        coefficients=(step_s, 0.0, prefill_token_s, 0.0, 0.0),
        num_steps=1,
        median_error=0.0,
        p90_error=0.0,
    )
    save(profile, path)
    return str(path)


def _believing(options: Mapping[str, Any]) -> dict[str, Any]:
    """A test that says how long an output becomes wants it predicted so, unless it says otherwise."""
    return {**options, "prediction": {"hints": "believed", **options.get("prediction", {})}}


class Rig:
    """One scheduler with runner and loop. Time stands still unless the test lets it pass."""

    def __init__(
        self,
        system: str | None = PREEMPTING,
        *,
        depth: int = 1,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.clock = VirtualClock(100.0)
        self.lengths: dict[str, int] = {}
        caching = kwargs.setdefault("enable_prefix_caching", True)
        self._hasher = block_hasher() if caching else None
        self.scheduler: Any = make_scheduler(
            STEERED if system else None,
            async_scheduling=depth == 2,
            additional_config={"vllm_ext": {"system": system, **_believing(options or {})}} if system else {},
            **kwargs,
        )
        if system:
            # Steps take no time here; what passes between two is no part of them.
            self.scheduler.observer.timer.counts_between = False
            self.scheduler.clock = self.clock
        self.runner = FakeRunner(output_lengths=self.lengths, pipelined=depth == 2)
        self.loop = EngineLoop(self.scheduler, self.runner, depth=depth)

    def add(
        self,
        req_id: str,
        prompt: int = 10,
        *,
        length: int = 8,
        osl: int | None = None,
        max_tokens: int = 400,
        priority: int = 0,
        **extra: Any,
    ) -> None:
        self.lengths[req_id] = length
        extra_args = dict(extra)
        if osl is not None:
            extra_args["osl"] = osl
        number = len(self.loop.outcomes)
        tokens = [100 + (37 * number + k) % 900 for k in range(prompt)]
        request = make_request(
            req_id,
            tokens,
            max_tokens=max_tokens,
            arrival_time=self.clock(),
            priority=priority,
            extra_args=extra_args or None,
            hasher=self._hasher,
        )
        self.loop.add(request)

    def step(self, count: int = 1, *, seconds: float = 0.0) -> Decision | None:
        decision = None
        for _ in range(count):
            decision = self.loop.step()
            self.clock.advance(seconds)
            audit(self.scheduler)
        return decision

    def drain(self, *, seconds: float = 0.0, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.loop.has_work:
                return
            self.step(seconds=seconds)
        raise AssertionError(f"stalled with {sorted(self.scheduler.requests)}")

    @property
    def running(self) -> list[str]:
        return [r.request_id for r in self.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        return [r.request_id for r in self.scheduler.waiting]

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.scheduler.vllm_ext_state(0)
        return state

    def record(self, req_id: str) -> dict[str, Any]:
        (found,) = [r for r in self.state["records"] if r["req_id"] == req_id]
        return found


class Loras:
    """vLLM's LoRA options, as far as its scheduler asks."""

    def __init__(self, max_loras: int) -> None:
        self.max_loras = max_loras


def unwatched(system: str | None, **limits: Any) -> Rig:
    """A rig without a prefix cache whose runner does not follow KV, since a test loads or changes it beside the runner.

    Unless told otherwise it has 8 seats, 512 tokens a step and 400 blocks.
    """
    found = {"num_blocks": 400, "max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 512, **limits}
    rig = Rig(system, enable_prefix_caching=False, **found)
    rig.runner.ledger = None
    return rig


@dataclass(frozen=True, kw_only=True)
class Job:
    step: int
    req_id: str
    prompt: int
    length: int
    osl: int | None


def workload(count: int = 30, *, seed: int = 0, gap: float = 3.0) -> list[Job]:
    rng = random.Random(seed)
    step, jobs = 0.0, []
    for number in range(count):
        step += rng.expovariate(1 / gap)
        length = rng.choice((1, 2, 5, 9, 20, 40))
        osl = rng.choice((None, length, 4 * length))
        jobs.append(Job(step=int(step), req_id=f"r{number}", prompt=rng.randint(3, 90), length=length, osl=osl))
    return jobs


def play(rig: Rig, jobs: list[Job], *, each_step: Callable[[Rig], None] | None = None) -> dict[str, list[int]]:
    """Run a workload to its end and return what every client received."""
    left = list(jobs)
    for number in range(5000):
        while left and left[0].step <= number:
            job = left.pop(0)
            rig.add(job.req_id, job.prompt, length=job.length, osl=job.osl)
        if not left and not rig.loop.has_work:
            return {req_id: outcome.token_ids for req_id, outcome in rig.loop.outcomes.items()}
        rig.step(seconds=0.01)
        if each_step is not None:
            each_step(rig)
    raise AssertionError("stalled")


def knobs(scheduler: Scheduler) -> tuple[object, ...]:
    """The settings of vLLM that a step's plan may change."""
    return (
        scheduler.max_num_scheduled_tokens,
        scheduler.max_num_active_reqs,
        scheduler.scheduler_config.long_prefill_token_threshold,
    )


def steps(rig: Rig, count: int) -> Table:
    """The next steps: tokens by request."""
    found = []
    for _ in range(count):
        decision = rig.step()
        assert decision is not None
        found.append(dict(decision.scheduled))
    return found
