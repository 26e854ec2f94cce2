"""Rows that nobody serves: ablations and baselines of papers, and upper bounds that know true output lengths."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.config.kv_tier import ALL, BY_TURNS
from vllm_ext.contract import Budget, Split, Step
from vllm_ext.contract.checks import require
from vllm_ext.systems.accelgen import SloMatch, SloPivotBudget, SloSlack
from vllm_ext.systems.alise import BoundedBypass, CostOverWait, EstimatedWait
from vllm_ext.systems.baselines import ReserveMaximum, Watermark, WholePrompts
from vllm_ext.systems.compose import register
from vllm_ext.systems.past_future import PREDICTED, PeakMemory
from vllm_ext.systems.pensieve import Retention
from vllm_ext.systems.sarathi import TbtBudget
from vllm_ext.systems.system import System


@dataclass(frozen=True, kw_only=True)
class ChunksApart(Budget):
    """Compute prompts in chunks, but never together with decodes: a step of chunks, then a step of decodes.

    Ablation "chunked-prefills-only". The paper does not say how chunks and decodes take turns; here every other step
    is one of decodes, as long as anything decodes.

    Source: Sarathi-Serve, section 5.2 and Table 4.
    """

    uses_predictions: ClassVar[bool] = False

    tokens: int = 0
    """Tokens of a step of chunks; 0 leaves vLLM's budget."""

    def __post_init__(self) -> None:
        require(self.tokens >= 0, "budget.tokens", self.tokens, "an integer of at least 0")

    def split(self, step: Step) -> Split:
        """Return which half of the work this step leaves out."""
        if step.num_decoding and step.number % 2 and (step.num_prefilling or step.num_waiting):
            return Split(tokens=step.decode_tokens, prefill=False)
        tokens = max(self.tokens, step.decode_tokens) if self.tokens else None
        return Split(tokens=tokens, apart=True)


_ALISE = "ALISE (arXiv 2410.23537)"
_SARATHI = "Sarathi-Serve (arXiv 2403.02310)"
_ACCELGEN = "AccelGen (arXiv 2503.13737)"
_PAST_FUTURE = "Past-Future (arXiv 2507.10150)"
_OFFLINE = "offline benchmarks only"
_ROUNDING = 0.004
"""Share of the pool that half a block for each request, counted on average, may fall short by."""

ROWS = (
    System(
        name="oracle-alise",
        ordering=CostOverWait,
        admission=BoundedBypass,
        residency=EstimatedWait,
        oracle=True,
        paper=f"{_ALISE}, Oracle",
        summary=f"alise with true output lengths; {_OFFLINE}",
    ),
    System(
        name="sarathi-hybrid-only",
        gates=(WholePrompts,),
        paper=f"{_SARATHI}, ablation",
        summary="ablation: prompts join decodes in one step, but are not cut into chunks",
    ),
    System(
        name="sarathi-chunked-only",
        budget=ChunksApart,
        paper=f"{_SARATHI}, ablation",
        summary="ablation: prompts are cut into chunks, but never share a step with decodes",
    ),
    System(
        name="oracle-sarathi",
        gates=(PeakMemory,),
        budget=TbtBudget,
        parameters={"admission": {"forecast": PREDICTED, "reserve": _ROUNDING}},
        oracle=True,
        paper=f"{_SARATHI}, with true lengths",
        summary=f"sarathi that admits by true output lengths and so never preempts; {_OFFLINE}",
    ),
    System(
        name="accelgen-no-chunk",
        ordering=SloSlack,
        admission=SloMatch,
        gates=(WholePrompts,),
        paper=f"{_ACCELGEN}, ablation /Chunk",
        summary="ablation: whole prompts, static token budget",
    ),
    System(
        name="accelgen-no-order",
        admission=SloMatch,
        budget=SloPivotBudget,
        parameters={"admission": {"ordered": False}},
        paper=f"{_ACCELGEN}, ablation /Order",
        summary="ablation: order of arrival",
    ),
    System(
        name="accelgen-no-batch",
        ordering=SloSlack,
        admission=SloMatch,
        budget=SloPivotBudget,
        parameters={"admission": {"match": False}},
        paper=f"{_ACCELGEN}, ablation /Batch",
        summary="ablation: requests join in the order of the queue, whatever they demand",
    ),
    System(
        name="accelgen-no-era",
        ordering=SloSlack,
        admission=SloMatch,
        budget=SloPivotBudget,
        parameters={"admission": {"exclusive": False}},
        paper=f"{_ACCELGEN}, ablation /ERA",
        summary="ablation: several long prompts at a time",
    ),
    System(
        name="oracle-accelgen",
        ordering=SloSlack,
        admission=SloMatch,
        budget=SloPivotBudget,
        oracle=True,
        paper=f"{_ACCELGEN}, Oracle",
        summary=f"accelgen with true output lengths; {_OFFLINE}",
    ),
    System(
        name="aggressive",
        gates=(Watermark,),
        paper=f"{_PAST_FUTURE}, baseline",
        summary="baseline: admission while prompts fit below a watermark",
    ),
    System(
        name="conservative",
        gates=(ReserveMaximum,),
        paper=f"{_PAST_FUTURE}, baseline",
        summary="baseline: admission while maximum lengths fit, times an overcommit",
    ),
    System(
        name="oracle-past-future",
        gates=(PeakMemory,),
        parameters={"admission": {"forecast": PREDICTED, "reserve": _ROUNDING}},
        oracle=True,
        paper=f"{_PAST_FUTURE}, theoretical optimum",
        summary=f"past-future with true output lengths; {_OFFLINE}",
    ),
    System(
        name="pensieve-published-turns",
        residency=Retention,
        parameters={"residency": {"reserve": 0.1, "tier_bits": 16, "returns": BY_TURNS, "copies": ALL}},
        paper="Pensieve (EuroSys '25)",
        summary="pensieve as section 3.4.3.1 words it: with the probability of a return after so many turns",
    ),
)

for _row in ROWS:
    register(dataclasses.replace(_row, served=False))
