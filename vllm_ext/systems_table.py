"""The rows of the systems table: each paper in five policies."""

from __future__ import annotations

from vllm_ext.policies.admission.once import PreemptOnce
from vllm_ext.policies.admission.pass_or_preempt import PassOrPreempt
from vllm_ext.policies.admission.passing import PassAFew
from vllm_ext.policies.admission.preemptive import Preemptive
from vllm_ext.policies.admission.slo_match import SloMatch
from vllm_ext.policies.budget.chunks_apart import ChunksApart
from vllm_ext.policies.budget.fixed_forward import FixedForward
from vllm_ext.policies.budget.separate_batches import SeparateBatches
from vllm_ext.policies.budget.slo_pivot import SloPivotBudget
from vllm_ext.policies.budget.tbt import TbtBudget
from vllm_ext.policies.gates.peak_memory import PREDICTED, PeakMemory
from vllm_ext.policies.gates.reserve_maximum import ReserveMaximum
from vllm_ext.policies.gates.watermark import Watermark
from vllm_ext.policies.gates.whole_prompts import WholePrompts
from vllm_ext.policies.ordering.cost_over_wait import CostOverWait
from vllm_ext.policies.ordering.gittins import GittinsOverWait
from vllm_ext.policies.ordering.least_computed import ArrivalLeastComputedLeaves
from vllm_ext.policies.ordering.pressing import PressingFirst
from vllm_ext.policies.ordering.skip_join import SkipJoin
from vllm_ext.policies.ordering.slo_slack import SloSlack
from vllm_ext.policies.residency.estimated_wait import SWAPPED, EstimatedWait
from vllm_ext.policies.residency.retention import Retention
from vllm_ext.policies.sharing.turns import TakeTurns
from vllm_ext.system import System

_ALISE = "ALISE (arXiv 2410.23537)"
_SARATHI = "Sarathi-Serve (arXiv 2403.02310)"
_ACCELGEN = "AccelGen (arXiv 2503.13737)"
_PAST_FUTURE = "Past-Future (arXiv 2507.10150)"
_ROUNDING = 0.004
"""Share of the pool that half a block for each request, counted on average, may fall short by."""
_OFFLINE = "offline benchmarks only"

ROWS = (
    System(name="fcfs", summary="vLLM's own scheduling, with our metrics"),
    System(
        name="fcfs-tuned",
        ordering=ArrivalLeastComputedLeaves,
        parameters={"admission": {"kv_reserve": 0.05}},
        summary="order of arrival, KV blocks in reserve, and whoever computed least leaves when they run out",
    ),
    System(
        name="fair",
        sharing=TakeTurns,
        paper="VTC (OSDI '24)",
        summary="clients take turns by the tokens they were served, whatever they send",
    ),
    System(
        name="alise",
        ordering=CostOverWait,
        admission=PassAFew,
        residency=EstimatedWait,
        paper=_ALISE,
        summary="least cost by predicted length and KV over a power of waiting, not preemptive",
    ),
    System(
        name="alise-ttft",
        ordering=GittinsOverWait,
        admission=PreemptOnce,
        residency=EstimatedWait,
        parameters={"admission": {"kv_reserve": 0.02}, "residency": {"choose": SWAPPED}},
        paper=_ALISE,
        summary="alise for first tokens: long requests leave for short ones once, for 15 s at most; with a KV tier",
    ),
    System(
        name="oracle-alise",
        ordering=CostOverWait,
        admission=PassAFew,
        residency=EstimatedWait,
        oracle=True,
        paper=f"{_ALISE}, Oracle",
        summary=f"alise with true output lengths; {_OFFLINE}",
    ),
    System(
        name="sarathi",
        budget=TbtBudget,
        paper=_SARATHI,
        summary="decodes never stall: a token budget from the TBT objective, fitted to every step",
    ),
    System(
        name="sarathi-static",
        budget=TbtBudget,
        parameters={"budget": {"dynamic": False}},
        paper=_SARATHI,
        summary="sarathi with one token budget, from profiling a reference batch",
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
        name="accelgen",
        ordering=SloSlack,
        admission=SloMatch,
        budget=SloPivotBudget,
        paper=_ACCELGEN,
        summary="least time left to the objective first, urgent requests preempt, compute and memory matched",
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
        name="past-future",
        gates=(PeakMemory,),
        paper=_PAST_FUTURE,
        summary="admission by the predicted peak of KV memory, from the lengths of recent requests",
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
        name="pensieve",
        residency=Retention,
        paper="Pensieve (EuroSys '25)",
        summary="conversations keep their KV between turns, and compute again what was dropped in front of it",
    ),
    System(
        name="auto",
        ordering=PressingFirst,
        admission=PassOrPreempt,
        budget=TbtBudget,
        residency=EstimatedWait,
        parameters={
            "budget": {"default_tbt_ms": 0.0},
            "residency": {"tier_bits": 16},
        },
        summary="our best: alise until an objective presses, TBT objectives kept",
    ),
    System(
        name="orca",
        gates=(ReserveMaximum, WholePrompts),
        paper="Orca (OSDI '22)",
        summary="baseline: arrival order, the maximum length of each request reserved, whole prompts",
    ),
    System(
        name="vllm-2023",
        gates=(Watermark, WholePrompts),
        budget=SeparateBatches,
        parameters={"admission": {"watermark": 0.99}},
        paper="vLLM 0.2 (SOSP '23)",
        summary="baseline: arrival order, steps of prompts before steps of decodes",
    ),
    System(
        name="fastgen",
        budget=FixedForward,
        paper="DeepSpeed-FastGen (arXiv 2401.08671)",
        summary="baseline: forward passes of fixed size, prompts split and fused to fill them",
    ),
    System(
        name="fastserve",
        ordering=SkipJoin,
        admission=Preemptive,
        residency=EstimatedWait,
        parameters={"admission": {"priced": False}, "residency": {"choose": SWAPPED, "tier_bits": 16}},
        paper="FastServe (arXiv 2305.05920)",
        summary="baseline: skip-join multi-level feedback queues, preemptive",
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
)
"""In the order of the documentation."""
