"""How long steps of an engine take, by decodes, their context, and prompt tokens beside. A part of `gpu_budget.py`.

Contexts need no prefill: vLLM's DecodeBenchConnector says that their KV is there already, and what KV holds costs no
time. Prompts are computed. Steps are timed in runs of several, so that what the host does beside the device, as in a
server with async scheduling, is hidden as it is there.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_engine import Engine

from vllm_ext.simulation.cost.fitted import Fitted, fit_steps
from vllm_ext.simulation.step_shape import StepShape
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


class Filled:
    """Says of new requests that the KV of their prompts is there, or lets them be computed."""

    def __init__(self, engine: Engine) -> None:
        self._connector = engine.scheduler.connector
        self._matched = self._connector.get_num_new_matched_tokens
        self._connector.get_num_new_matched_tokens = self._answer
        self.on = False

    def _answer(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._matched(request, num_computed_tokens) if self.on else (0, False)


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
    """Which cells are measured."""

    decodes: Sequence[int] = (1, 8, 32, 64, 128, 256)
    contexts: Sequence[int] = (512, 2048, 4096, 16384)
    prompt_tokens: Sequence[int] = (0, 128, 256, 512, 1024, 2048, 4096, 8192)
    steps: int = 3
    """Of a run, at least; more where they are short, since the first of them may wait for the host."""
    runs: int = 2

    def pairs(self, kv_tokens: int) -> Iterator[tuple[int, int]]:
        """Yield decodes and contexts whose KV, with that of a prompt, the device holds; and no decodes."""
        room = 0.95 * (kv_tokens - 2 * max(self.prompt_tokens))
        yield 0, 0
        yield from ((n, c) for n in self.decodes for c in self.contexts if n * (c + 256) <= room)


@dataclass
class Grid:
    """Measures cells of one engine.

    Args:
        engine: Made with `FILL`, without a system of ours, prefix caching off.
        filled: Of it.
    """

    engine: Engine
    filled: Filled
    cells: list[Cell] = field(default_factory=list)
    _prompts: int = 0

    def measure(self, spec: GridSpec) -> Iterator[Cell]:
        """Measure cell by cell, prompts alone first."""
        scheduler = self.engine.scheduler
        kv_tokens = scheduler.kv_cache_manager.block_pool.num_gpu_blocks * scheduler.block_size
        most = scheduler.max_num_scheduled_tokens
        for decodes, context in spec.pairs(kv_tokens):
            running = self._decodes(decodes, context)
            for tokens in sorted({min(tokens, most - decodes) for tokens in spec.prompt_tokens}):
                if tokens or decodes:
                    cell = self._cell(decodes, context, tokens, spec)
                    self.cells.append(cell)
                    yield cell
            self.engine.abort(running)
        scheduler.max_num_scheduled_tokens = most

    def _decodes(self, count: int, context: int) -> list[str]:
        """Bring requests into the batch that will decode for as long as the cells take."""
        engine, scheduler = self.engine, self.engine.scheduler
        most = scheduler.max_num_scheduled_tokens
        self.filled.on = True
        left = scheduler.max_model_len - context - 1
        ids = [engine.add(engine.prompt(number, context), left) for number in range(count)]
        while len(scheduler.running) < count:
            engine.step()
        self.filled.on = False
        for _ in range(3 if count else 0):
            engine.step()
        scheduler.max_num_scheduled_tokens = most
        return ids

    def _cell(self, decodes: int, context: int, tokens: int, spec: GridSpec) -> Cell:
        first = self._run(decodes, tokens, 1)  # with what is compiled or looked up for this shape
        steps = min(_MOST_STEPS, max(spec.steps, int(_RUN_S / first)))
        seconds = tuple(self._run(decodes, tokens, steps) / steps for _ in range(spec.runs))
        return Cell(decodes=decodes, context=context, prompt_tokens=tokens, steps=steps, seconds=seconds)

    def _run(self, decodes: int, tokens: int, steps: int) -> float:
        """Return the seconds of so many steps, each of all decodes and so many prompt tokens."""
        engine, scheduler = self.engine, self.engine.scheduler
        scheduler.max_num_scheduled_tokens = decodes + max(1, tokens)
        if not tokens:
            began = engine.now()
            for _ in range(steps):
                engine.step()
            return engine.now() - began
        ids = []
        for _ in range(steps):
            self._prompts += 1
            ids.append(engine.add(engine.prompt(10_000 + self._prompts, tokens), 1))
        began = engine.now()
        while not all(engine.seen[req_id].ended for req_id in ids):
            engine.step()
        return engine.now() - began


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
