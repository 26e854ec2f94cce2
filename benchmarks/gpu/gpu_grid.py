"""How long steps of an engine take, by decodes, their context, and prompt tokens beside. A part of `gpu_budget.py`.

Contexts need no prefill: vLLM's DecodeBenchConnector says that their KV is there already, and what KV holds costs no
time. Prompts are computed. Steps are timed in runs of several, so that what the host does beside the device, as in a
server with async scheduling, is hidden as it is there. A cell whose steps the scheduler plans otherwise is dropped.

The order brackets what is measured, whenever time runs out: prompts alone, then few and many decodes, short and long
contexts, and of each first no prompt tokens and the most.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gpu_engine import Engine

from vllm_ext.simulation.cost.fitted import Fitted, fit_steps
from vllm_ext.simulation.cost.step_shape import StepShape
from vllm_ext.step_time import profile as profiles
from vllm_ext.step_time.fit import fit
from vllm_ext.step_time.runtime import StepFeatures

FILL: dict[str, Any] = {
    "kv_transfer_config": {
        "kv_connector": "DecodeBenchConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"fill_std": 0.02, "startup_fill": True},
    }
}
"""Arguments of an engine whose contexts need no prefill, as long as `Filled` lets them."""


_MOST_STEPS, _RUN_S = 12, 0.06
_SEATS_BESIDE = 16
"""Seats besides those of decodes. A prompt holds one until its step has ended, and others are planned meanwhile."""
_SPARE_STEPS = 4
"""That a run may take beyond those it times, and decodes until all of them run."""


class NotAsPlanned(RuntimeError):
    """An engine took other steps than those of a cell."""


class Filled:
    """Says of new requests that the KV of their prompts is there, or lets them be computed."""

    def __init__(self, engine: Engine) -> None:
        self._connector = engine.scheduler.connector
        self._matched = self._connector.get_num_new_matched_tokens
        self._connector.get_num_new_matched_tokens = self._answer
        self.on = False

    def _answer(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._matched(request, num_computed_tokens) if self.on else (0, False)


class StepSize(NamedTuple):
    """What a scheduler planned for a step."""

    requests: int
    tokens: int

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.requests} requests with {self.tokens} tokens"


class Planned:
    """Notes the steps that a scheduler plans, in their order; a step without tokens is none."""

    def __init__(self, engine: Engine) -> None:
        self._schedule = engine.scheduler.schedule
        engine.scheduler.schedule = self._noted
        self.steps: list[StepSize] = []

    def _noted(self, *args: Any) -> Any:
        output = self._schedule(*args)
        if tokens := output.total_num_scheduled_tokens:
            self.steps.append(StepSize(len(output.num_scheduled_tokens), tokens))
        return output


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Steps of one shape."""

    decodes: int
    context: int
    """Tokens that each decode attends to, at the first of the steps."""
    prompt_tokens: int
    """Computed in each step beside the decodes."""
    steps: int
    """Timed together in a run."""
    seconds: tuple[float, ...]
    """Of a step, in each run."""

    def shape(self) -> StepShape:
        """Return what a step consisted of, as the simulator's cost models have it."""
        shape = StepShape.of_decodes(self.decodes, self.context + self.steps // 2)
        return shape.plus(StepShape.of_chunk(self.prompt_tokens)) if self.prompt_tokens else shape

    def features(self) -> StepFeatures:
        """Return the same as the runtime model has it."""
        held = self.decodes * (self.context + self.steps // 2) + self.prompt_tokens
        return StepFeatures(self.decodes, self.prompt_tokens, held, self.prompt_tokens**2 / 2)


@dataclass(frozen=True, kw_only=True)
class GridSpec:
    """Which cells are measured, in their order: what is left out when time runs out lies between those that are not."""

    corners: Sequence[tuple[int, int]] = ((256, 512), (1, 512), (16, 16384), (128, 2048), (1, 16384))
    """Decodes, and the tokens of each context, between which all others lie."""
    corner_tokens: Sequence[int] = (0, 8192, 512, 2048)
    """Of prompts beside them."""
    inner: Sequence[tuple[int, int]] = (
        (256, 1024), (64, 512), (128, 512), (32, 4096), (128, 1024), (32, 512), (64, 4096), (8, 4096),
    )  # fmt: skip
    """The same of the others."""
    inner_tokens: Sequence[int] = (0, 512, 2048)
    alone: Sequence[int] = (8192, 128, 1024, 512, 2048, 4096, 256)
    """Tokens of prompts without decodes, which are measured before all else."""
    steps: int = 3
    """Of a run, at least; more where they are short, since the first of them may wait for the host, and two where each
    lasts as long as a run should."""
    runs: int = 2

    @property
    def seats(self) -> int:
        """Requests that an engine has to have seats for: with all seats taken no prompt is ever begun."""
        return max(decodes for decodes, _ in (*self.corners, *self.inner)) + _SEATS_BESIDE

    def cells(self, kv_tokens: int, most_tokens: int) -> Iterator[tuple[int, int, Sequence[int]]]:
        """Yield decodes, their contexts, and prompt tokens beside them, as far as the device holds the KV of all.

        Args:
            kv_tokens: That the device holds.
            most_tokens: Of a step.
        """
        yield 0, 0, self._within(self.alone, most_tokens)
        room = 0.95 * (kv_tokens - 2 * max(self.corner_tokens))
        for pairs, tokens in ((self.corners, self.corner_tokens), (self.inner, self.inner_tokens)):
            for decodes, context in pairs:
                if decodes * (context + 256) <= room:
                    yield decodes, context, self._within(tokens, most_tokens - decodes)

    @staticmethod
    def _within(sizes: Sequence[int], most: int) -> Sequence[int]:
        return list(dict.fromkeys(min(size, most) for size in sizes))


@dataclass
class Grid:
    """Measures cells of one engine.

    Args:
        engine: Made with `FILL` and `GridSpec.seats`, without a system of ours, prefix caching off.
    """

    engine: Engine
    cells: list[Cell] = field(default_factory=list)
    dropped: list[dict[str, Any]] = field(default_factory=list)
    """Cells whose steps were not as planned, with the reason."""
    _prompts: int = 0

    def __post_init__(self) -> None:
        self._filled, self._planned = Filled(self.engine), Planned(self.engine)

    def measure(self, spec: GridSpec) -> Iterator[None]:
        """Measure cell by cell; yield whenever one was added to `cells` or `dropped`."""
        scheduler = self.engine.scheduler
        kv_tokens = scheduler.kv_cache_manager.block_pool.num_gpu_blocks * scheduler.block_size
        most = scheduler.max_num_scheduled_tokens
        for decodes, context, sizes in spec.cells(kv_tokens, most):
            running: list[str] = []
            for tokens in sizes:
                try:
                    running = running or self._decodes(decodes, context, most)
                    self.cells.append(self._cell(running, context, tokens, spec))
                except NotAsPlanned as error:
                    cell = {"decodes": decodes, "context": context, "prompt_tokens": tokens, "reason": str(error)}
                    self.dropped.append(cell)
                    self.engine.abort_all()
                    running = []
                yield
            self.engine.abort(running)
        scheduler.max_num_scheduled_tokens = most

    def _decodes(self, count: int, context: int, most_tokens: int) -> list[str]:
        """Bring requests into the batch that will decode for as long as the cells take.

        Raises:
            NotAsPlanned: they do not all run; they are left in the engine.
        """
        engine, scheduler = self.engine, self.engine.scheduler
        scheduler.max_num_scheduled_tokens = most_tokens
        self._filled.on = True
        left = scheduler.max_model_len - context - 1
        ids = [engine.add(engine.prompt(number, context), left) for number in range(count)]
        for _ in range(_SPARE_STEPS if count else 0):
            engine.step()
        self._filled.on = False
        if (running := len(scheduler.running)) != count:
            raise NotAsPlanned(f"{running} of {count} decodes run after {_SPARE_STEPS} steps")
        return ids

    def _cell(self, running: Sequence[str], context: int, tokens: int, spec: GridSpec) -> Cell:
        began, planned = self.engine.now(), len(self._planned.steps)
        self._run(len(running), tokens, 1)  # with what is compiled or looked up for this shape
        # Not what it returns: some of the step may pass while those under way before it are waited for.
        step_s = (self.engine.now() - began) / (len(self._planned.steps) - planned)
        least = spec.steps if step_s < _RUN_S else 2  # a wait for the host is nothing beside a long one
        steps = min(_MOST_STEPS, max(least, int(_RUN_S / step_s)))
        done = len(self.engine.seen[running[0]].token_times_s) if running else 0
        seconds = tuple(self._run(len(running), tokens, steps) / steps for _ in range(spec.runs))
        return Cell(decodes=len(running), context=context + done, prompt_tokens=tokens, steps=steps, seconds=seconds)

    def _run(self, decodes: int, tokens: int, steps: int) -> float:
        """Return the seconds of so many steps, each of all decodes and a prompt of so many tokens.

        Raises:
            NotAsPlanned: a step was another one, or took too long to come.
        """
        engine = self.engine
        engine.scheduler.max_num_scheduled_tokens = decodes + max(1, tokens)
        ids = [self._prompt(tokens) for _ in range(steps if tokens else 0)]
        planned, wanted = len(self._planned.steps), StepSize(decodes + bool(tokens), decodes + tokens)
        for _ in range(engine.in_flight):  # those that were planned before
            engine.step()
        began, taken = engine.now(), 0
        while taken < steps or not all(engine.seen[req_id].ended for req_id in ids):
            if taken == steps + _SPARE_STEPS:
                raise NotAsPlanned(f"prompts of {tokens} tokens beside {decodes} decodes did not end in {taken} steps")
            engine.step()
            taken += 1
            if other := next((size for size in self._planned.steps[planned : planned + steps] if size != wanted), None):
                raise NotAsPlanned(f"a step had {other} rather than {wanted}")
        return engine.now() - began

    def _prompt(self, tokens: int) -> str:
        self._prompts += 1
        return self.engine.add(self.engine.prompt(10_000 + self._prompts, tokens), 1)


def cost_of(cells: Sequence[Cell], source: str) -> Fitted:
    """Fit the simulator's cost model."""
    steps = [(cell.shape(), seconds) for cell in cells for seconds in cell.seconds]
    return fit_steps(*zip(*steps, strict=True), source)


def save_profile(cells: Sequence[Cell], key: profiles.EngineKey, vllm_version: str, path: Path) -> profiles.Profile:
    """Fit the runtime model and keep it as ``--ext-profile`` reads it."""
    found = fit([(cell.features(), seconds) for cell in cells for seconds in cell.seconds])
    tokens, seconds = pivot(cells)
    profile = profiles.Profile(
        **key._asdict(), vllm_version=vllm_version, coefficients=found.coefficients, num_steps=found.num_steps,
        median_error=found.median_error, p90_error=found.p90_error, regimes=found.regimes, terms=found.terms,
        pivot_tokens=tokens, pivot_s=seconds, pivot_saturated=tokens < max(cell.prompt_tokens for cell in cells),
    )  # fmt: skip
    profiles.save(profile, path)
    return profile


def pivot(cells: Iterable[Cell], share: float = 0.95) -> tuple[int, float]:
    """Return tokens and seconds of the smallest step of prompts alone with nearly the best throughput."""
    alone = sorted((cell.prompt_tokens, statistics.median(cell.seconds)) for cell in cells if not cell.decodes)
    best = max(tokens / seconds for tokens, seconds in alone)
    return next((tokens, seconds) for tokens, seconds in alone if tokens / seconds >= share * best)


def saturation_per_s(cost: Fitted, *, prompt: float, output: float, seats: int, kv_tokens: int) -> float:
    """Return the requests per second at which steps with a full batch are just enough.

    In the steady state N requests run, each for ``output`` steps: a step takes N decodes and N / output new prompts.

    Args:
        cost: Of a step.
        prompt: Mean tokens of a prompt.
        output: Mean tokens of an output.
        seats: Requests that may run at once.
        kv_tokens: That the device holds.
    """
    held = prompt + output / 2
    rates = []
    for running in range(1, min(seats, int(kv_tokens / held)) + 1):
        shape = StepShape.of_decodes(running, round(held))
        fresh = max(1, round(running * prompt / output))
        step_s = cost.device_s(shape.plus(StepShape.of_chunk(fresh)))
        rates.append(running / (output * step_s))
    return statistics.fmean(sorted(rates)[-3:])
