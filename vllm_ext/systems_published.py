"""Rows that are the papers': every parameter as published, and every switch of ours off.

Each row names all fields of its policies, so that a field which is added later needs a published value here. Where a
paper leaves a value open, the comment says so.
"""

from __future__ import annotations

from vllm_ext.config_kv import ALL, BY_AGE, BY_TURNS
from vllm_ext.policies.admission.preemptive import Preemptive
from vllm_ext.policies.admission.slo_match import SloMatch
from vllm_ext.policies.budget.slo_pivot import SloPivotBudget
from vllm_ext.policies.budget.tbt import TbtBudget
from vllm_ext.policies.gates.peak_memory import HISTORY, PeakMemory
from vllm_ext.policies.ordering.remaining_time import RemainingTimeLevels
from vllm_ext.policies.ordering.slo_slack import SloSlack
from vllm_ext.policies.residency.estimated_wait import SWAPPED, EstimatedWait
from vllm_ext.policies.residency.retention import Retention
from vllm_ext.system import System


def _pensieve(name: str, returns: str, summary: str) -> System:
    retention = {"reserve": 0.1, "tier_bits": 16, "returns": returns, "copies": ALL}
    return System(
        name=name,
        residency=Retention,
        parameters={"residency": retention},
        paper="Pensieve (EuroSys '25)",
        summary=summary,
    )


_ALL = 32
"""Requests that the scheduler shows: no bound of ours below that."""
_NEVER_S = 1e6

PUBLISHED = (
    System(
        name="alise-published",
        ordering=RemainingTimeLevels,
        admission=Preemptive,
        residency=EstimatedWait,
        parameters={
            # The number of queues, their widths and the age threshold K are not in the paper.
            "ordering": {"num_levels": 6, "base_level_s": 0.5, "age_limit_s": 300.0},
            "admission": {
                "preempt": True,
                "priced": False,
                "gain_ratio": 1.0,
                "min_progress_tokens": 1,
                "spare_outlived": False,
                "max_preempting": _ALL,
                "max_victims": _ALL,
            },
            "residency": {
                "choose": SWAPPED,
                "exposed": 1.0,
                "ahead": True,
                "every_steps": 1,
                "max_leaving": _ALL,
                "tier_bits": 8,
            },
        },
        paper="ALISE (arXiv 2410.23537)",
        summary="alise as published: preempts whoever ranks worse, and always swaps in 8 bits",
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
        paper="Sarathi-Serve (arXiv 2403.02310)",
        summary="sarathi as published: one budget for a reference batch, nothing for prompts where decodes fill it",
    ),
    System(
        name="accelgen-published",
        ordering=SloSlack,
        admission=SloMatch,
        budget=SloPivotBudget,
        parameters={
            "ordering": {"relegate": False, "lost_steps": 0.0, "age_limit_s": _NEVER_S},
            "admission": {
                "gamma_s": 0.75,
                "gamma_steps": 0.0,
                "lost_steps": 0.0,
                "lost_urgent": True,
                "match": True,
                "ordered": True,
                "exclusive": True,
                "long_prompt_tokens": 4095,  # "long" is 4K tokens and more
                "preempt": True,
                "min_progress_tokens": 1,
                "spare": False,
                "max_victims": _ALL,
            },
            "budget": {"fitted": False, "every_objective": True, "within_kv": True},
        },
        paper="AccelGen (arXiv 2503.13737)",
        summary="accelgen as published: lost objectives stay urgent, answers are preempted, equation 6 decides alone",
    ),
    System(
        name="past-future-published",
        gates=(PeakMemory,),
        parameters={
            "admission": {
                "reserve": 0.05,
                "forecast": HISTORY,
                "window": 1000,
                "cold_requests": 10,  # how a history begins is not in the paper
                "least_draws": 256,  # small batches are drawn several times; how often is not in the paper
                "most_repeats": 5,
                "stratify": False,
                "redraw_steps": 1,
            }
        },
        paper="Past-Future (arXiv 2507.10150)",
        summary="past-future as published: lengths drawn anew in every step, each by itself",
    ),
    _pensieve(
        "pensieve-published",
        BY_AGE,
        "pensieve as published: stores and loads whatever it costs, and goes by equation 3.4, Cost / T",
    ),
    _pensieve(
        "pensieve-published-turns",
        BY_TURNS,
        "pensieve as section 3.4.3.1 words it: with the probability of a return after so many turns",
    ),
)
"""In the order of the documentation."""
