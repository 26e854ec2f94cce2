"""Sarathi-Serve (OSDI '24): decodes never stall, as prompts get what the token budget leaves them."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from vllm_ext.config import ConfigError
from vllm_ext.config.slo import SloConfig
from vllm_ext.contract import Budget, Need, Split, Step
from vllm_ext.contract.checks import require
from vllm_ext.step_time.runtime import RuntimeModel, StepFeatures
from vllm_ext.systems.system import System

logger = logging.getLogger("vllm.vllm_ext.slo")
_NO_CHANGE = Split()


@dataclass(frozen=True, kw_only=True)
class TbtBudget(Budget):
    """Give a step as many tokens as keep the gap between tokens within the objective.

    Decodes come first; what the budget leaves goes to unfinished prompts, then to new ones. The objective is the
    tightest of those who run, else the configured default (``--tbt-slo-ms``), else ``default_tbt_ms``. A step that
    decodes nothing delays nobody's next token and is left at vLLM's budget.

    The *dynamic* budget asks the step-time model how many prompt tokens fit beside this step's decodes, with the
    contexts that they have now: it shrinks as the prefilled prompt, the batch and its contexts grow. The *static* one
    asks once for a reference batch, as the paper's one-time profiling does.

    Budgets of a tile and more are rounded down to whole tiles: one token more would start another tile of every matrix
    product. At least ``min_prefill_tokens`` are granted whatever the objective says: decodes alone may already take
    longer, and prompts that are never computed would wait until they have ended. As published it is 0.

    Source: Sarathi-Serve, Algorithm 3 and section 4.3; the dynamic budget is what the paper leaves as future work.
    """

    uses_predictions: ClassVar[bool] = False
    stall_free: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({Need.STEP_TIMES})
    """A decode never waits behind a prefill chunk, whatever the ordering."""

    dynamic: bool = True
    """Fit every step; False: one budget for a reference batch."""
    default_tbt_ms: float = 200.0
    """Objective of requests for which neither they nor the configuration name one, in milliseconds; 0: they have none.
    Where nobody has one, steps are left at vLLM's budget."""
    tile_tokens: int = 0
    """Tile of the device's matrix products along the tokens, a power of two; 1 switches rounding off, 0 takes what the
    step-time model knows of the device."""
    min_prefill_tokens: int = 64
    """Prompt tokens granted to a step at least, while a prompt is there to compute."""
    safety: float = 0.9
    """Share of the objective that a step may take by the model: the rest is for what the model does not know."""
    tokens: int = 0
    """The static budget itself, where it is known; 0: made of the objective."""
    reference_decodes: int = 32
    """Decodes of the static budget's reference batch. Source: Sarathi-Serve, section 5.1."""
    reference_context: int = 4096
    """Context of each of them, in tokens."""

    def __post_init__(self) -> None:
        require(self.default_tbt_ms >= 0, "budget.default_tbt_ms", self.default_tbt_ms, "milliseconds, at least 0")
        power = self.tile_tokens >= 0 and self.tile_tokens & (self.tile_tokens - 1) == 0
        require(power, "budget.tile_tokens", self.tile_tokens, "a power of two, or 0 for the device's")
        require(self.reference_decodes >= 1, "budget.reference_decodes", self.reference_decodes, "an integer from 1 on")
        for field in ("tokens", "reference_context", "min_prefill_tokens"):
            require(getattr(self, field) >= 0, f"budget.{field}", getattr(self, field), "an integer of at least 0")
        require(0 < self.safety <= 1, "budget.safety", self.safety, "greater than 0 and at most 1")
        fixed = not (self.tokens and self.dynamic)
        require(fixed, "budget.tokens", self.tokens, "0 with a dynamic budget; set budget.dynamic to false")

    def split(self, step: Step) -> Split:
        """Return the step's token budget; where the ordering has requests press, they get their share of it."""
        return beside_pressing(step, self._of_the_objective(step))

    def _of_the_objective(self, step: Step) -> Split:
        if not step.num_decoding or not (step.num_prefilling or step.num_waiting) or not self.objective_s(step):
            return _NO_CHANGE
        if self.dynamic:
            fitting = fitting_prompt_tokens(step, self.safety * self.objective_s(step))
            tokens = step.decode_tokens + fitting
        else:
            tokens = self.static_tokens(step.runtime, self.objective_s(step))
        return Split(tokens=max(self.rounded(tokens, step.runtime), step.decode_tokens + self.min_prefill_tokens))

    def objective_s(self, step: Step) -> float:
        """Return the gap that no token of this step may exceed, in seconds; 0 if there is none."""
        tightest = step.tbt_s(self.default_tbt_ms / 1000 or math.inf)
        return 0.0 if math.isinf(tightest) else tightest

    def rounded(self, tokens: int, runtime: RuntimeModel) -> int:
        """Return the largest number of whole tiles in ``tokens``; below one tile, ``tokens``."""
        tile = self.tile_tokens or runtime.tile_tokens
        return tokens - tokens % tile if tokens >= tile else tokens

    def static_tokens(self, runtime: RuntimeModel, objective_s: float) -> int:
        """Return the most tokens that a step with the reference batch may have, those of its decodes included."""
        if self.tokens:
            return self.tokens
        decodes = self.reference_decodes
        context = decodes * self.reference_context
        fitting = runtime.largest_prefill(self.safety * objective_s, decodes, context, computed=0)
        return decodes + fitting


_KEPT = 8
"""Running prompts keep an eighth of a step however many press, so that they come to an end."""


def beside_pressing(step: Step, split: Split) -> Split:
    """Return a split in which running prompts leave what those need who must join now to keep an objective.

    Source: AccelGen, Algorithm 1: urgent requests go before chunks of prompts that run.
    """
    if not step.num_prefilling or not step.num_waiting:
        return split
    front = itertools.takewhile(lambda candidate: candidate.presses or candidate.aged, step.waiting())
    wanted = sum(candidate.request.missing_tokens for candidate in front if candidate.presses)
    if not wanted:
        return split
    free = split.budget(step.token_budget) - step.decode_tokens
    left = max(free - wanted, free // _KEPT, 0)
    return replace(split, chunk=left // step.num_prefilling)


def fitting_prompt_tokens(step: Step, step_s: float) -> int:
    """Return the prompt tokens that fit beside the step's decodes if it may take ``step_s`` seconds.

    All of them are taken to be at the context of the furthest of the unfinished prompts.
    """
    computed = max((request.num_computed_tokens for request in step.prefilling()), default=0)
    context = step.context_tokens - computed
    if step.decode_tokens > step.num_decoding:  # with drafts to verify, a decode is a chunk to the step-time model
        return max(0, step.runtime.largest_prefill(step_s, 0, context, computed) - step.decode_tokens)
    return step.runtime.largest_prefill(step_s, step.num_decoding, context, computed)


def decode_steps_ms(times: float, runtime: RuntimeModel) -> float:
    """Return so many decode steps of the reference batch in milliseconds, to three digits (Sarathi-Serve, 5.1)."""
    step = StepFeatures(TbtBudget.reference_decodes, 0, TbtBudget.reference_decodes * TbtBudget.reference_context)
    return float(f"{1000 * times * runtime.step_time_s(step):.3g}")


def in_milliseconds(slo: SloConfig, runtime: Callable[[], RuntimeModel] = RuntimeModel) -> SloConfig:
    """Return objectives whose multiples of a decode step are milliseconds, by the runtime model as it starts.

    Raises:
        ConfigError: there is a multiple, and the model starts from no measurement.
    """
    runtime = functools.cache(runtime)

    def plain(at: str, tbt_ms: float | str | None) -> float | str | None:
        if not isinstance(tbt_ms, str):
            return tbt_ms
        found_ms = math.inf if runtime().given is None else decode_steps_ms(float(tbt_ms[:-1]), runtime())
        if not 0 < found_ms < math.inf:
            allowed = "run `vllm-ext profile` with this server's flags and add --ext-profile auto, or name milliseconds"
            raise ConfigError(f"{at}.tbt_ms", tbt_ms, f"needs measured step times: {allowed}")
        logger.info("%s.tbt_ms=%s is %g ms, by the runtime model", at, tbt_ms, found_ms)
        return found_ms

    classes = {name: one.changed(tbt_ms=plain(f"slo.classes.{name}", one.tbt_ms)) for name, one in slo.classes.items()}
    return slo.changed(tbt_ms=plain("slo", slo.tbt_ms), classes=classes)


_PAPER = "Sarathi-Serve (arXiv 2403.02310)"

ROWS = (
    System(
        name="sarathi",
        budget=TbtBudget,
        paper=_PAPER,
        summary="decodes never stall: a token budget from the TBT objective, fitted to every step",
    ),
    System(
        name="sarathi-static",
        budget=TbtBudget,
        parameters={"budget": {"dynamic": False}},
        paper=_PAPER,
        summary="sarathi with one token budget, from profiling a reference batch",
    ),
    System(
        name="sarathi-published",
        budget=TbtBudget,
        parameters={
            "budget": {
                "dynamic": False,
                "default_tbt_ms": 200.0,  # the paper derives objectives from each model's own decode time
                "tile_tokens": 0,  # the device's
                "min_prefill_tokens": 0,
                "safety": 1.0,
                "tokens": 0,
                "reference_decodes": 32,
                "reference_context": 4096,
            }
        },
        paper=_PAPER,
        summary="sarathi as published: one budget for a reference batch, nothing for prompts where decodes fill it",
    ),
)
