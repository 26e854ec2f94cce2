"""How long a request can still wait before it misses an objective.

Source: AccelGen, section 4.3 and Figure 10. In its notation: S_r tokens left of the prompt, N_ck chunks, T_max a step,
S_g tokens left to generate, T_w time waited, T_e time to execute, T_r remaining time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from vllm_ext.config.slo import BUCKET_TOKENS
from vllm_ext.contract import RequestView

READING_TBT_S = 0.1875
"""Time between tokens at which people read, in seconds. Source: AccelGen, section 3.1."""
PROMPT_TIMES = 5.0
"""TTFT where nobody names one: this many times what the prompt's bucket takes to compute alone. Ours: the paper draws
objectives around what its own engine measured."""
LEAST_TTFT_S = 1.0
"""... and at least this, in seconds."""


class Slack(NamedTuple):
    """What is left until an objective is missed. Clock times and durations in seconds."""

    start_by: float
    """Clock time at which the request must run to keep its objective; now + T_r. While a request waits it stands still
    but for changes of the engine's pace."""
    lost_at: float
    """Clock time from which the objective can't be met any more, even by an engine that does nothing else; infinite
    where a miss can't be foreseen."""


def slack(request: RequestView, now: float) -> Slack:
    """Return the tightest slack over the request's objectives.

    Where a request names none, the reading speed and a TTFT for its bucket of 512 prompt tokens say when it must run;
    only objectives that somebody named can be lost.
    """
    if request.slo.e2e_s is None:
        found = _online(request, now)
    else:
        found = _offline(request, request.slo.e2e_s, now)
        if request.slo.ttft_s is not None or request.slo.tbt_s is not None:
            found = _tighter(_online(request, now), found)
    return found._replace(lost_at=-math.inf) if request.missed else found


def at_stake(request: RequestView, now: float) -> Slack | None:
    """Return the tightest slack over the objectives that somebody named and that can still be kept; None without any.

    Before the first token no gap between tokens can be too long, and after it the TTFT is settled.
    """
    slo, found = request.slo, None
    if (slo.tbt_s if request.num_output_tokens else slo.ttft_s) is not None:
        found = _online(request, now)
    if slo.e2e_s is not None:
        job = _offline(request, slo.e2e_s, now)
        found = job if found is None else _tighter(found, job)
    return None if found is None or request.missed or found.lost_at <= now else found


def given_up_at(request: RequestView, left: Slack, margin_steps: float) -> float:
    """Return the clock time from which an objective is taken for lost: so many mean steps before that is certain.

    In those last steps a request could be met only by a step without anybody else. Under overload there always is one,
    and served in order of deadlines each takes the place of one that could be met.
    """
    return left.lost_at - margin_steps * request.step_stats.step_s


def chunks(request: RequestView) -> int:
    """Return N_ck, the steps that what is missing of the sequence takes: 1 for a request that decodes."""
    return max(1, math.ceil(request.missing_tokens / max(request.step_stats.chunk_tokens, 1.0)))


def ttft_s(request: RequestView) -> float:
    """Return the TTFT objective in seconds, or what stands for it."""
    if request.slo.ttft_s is not None:
        return request.slo.ttft_s
    bucket = math.ceil(request.num_prompt_tokens / BUCKET_TOKENS) * BUCKET_TOKENS / request.num_prompt_tokens
    return max(LEAST_TTFT_S, PROMPT_TIMES * bucket * request.prompt_s)


def job_step_s(request: RequestView, jct_s: float) -> float:
    """Return what each step of a job may take, in seconds: T_r and T_e of a step, its allowance spread evenly."""
    return jct_s / sum(_steps_of_job(request))


def _tighter(one: Slack, other: Slack) -> Slack:
    return Slack(min(one.start_by, other.start_by), min(one.lost_at, other.lost_at))


def _online(request: RequestView, now: float) -> Slack:
    """T_r = SLO - T_w - T_e of the next token; T_w is 0 for a decode that returns from a step."""
    execute_s = chunks(request) * request.step_stats.longest_step_s
    if not request.num_output_tokens:
        deadline = request.arrival_time + ttft_s(request)
        lost_at = math.inf if request.slo.ttft_s is None else deadline - request.prefill_s
        return Slack(deadline - execute_s, lost_at)
    tbt_s = READING_TBT_S if request.slo.tbt_s is None else request.slo.tbt_s
    if request.waiting_since is None:
        return Slack(now + tbt_s - execute_s, math.inf)
    next_by = request.waiting_since + tbt_s
    return Slack(next_by - execute_s, math.inf if request.slo.tbt_s is None else next_by - request.prefill_s)


def _steps_of_job(request: RequestView) -> tuple[int, int]:
    """Return the steps that a job takes from its start to its end, as predicted: for the prompt, and for the output."""
    all_chunks = max(1, math.ceil(request.num_prompt_tokens / max(request.step_stats.chunk_tokens, 1.0)))
    return all_chunks, max(request.num_output_tokens + 1, request.predicted_output_tokens)


def _offline(request: RequestView, jct_s: float, now: float) -> Slack:
    """T_r of a job: the wait that is left of its allowance, which is spread evenly over its steps and carried over."""
    stats = request.step_stats
    token_s = stats.longest_step_s + stats.preemption_s
    done = request.num_output_tokens
    all_chunks, tokens = _steps_of_job(request)
    whole_s = all_chunks * stats.longest_step_s + tokens * token_s
    allowance_s = (jct_s - whole_s) / (all_chunks + tokens)
    # Computed prompt tokens count as the steps they took.
    computed = min(request.num_computed_tokens, request.num_prompt_tokens)
    steps_done = int(all_chunks * computed / request.num_prompt_tokens) + done
    lateness_s = now - request.arrival_time - steps_done * token_s
    deadline = request.arrival_time + jct_s
    return Slack(now + (steps_done + 1) * allowance_s - lateness_s, deadline - request.predicted_remaining_s)
