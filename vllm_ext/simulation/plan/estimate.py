"""What a server carries, by the lengths of its requests alone: a figure before anything is run."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import numpy as np

from vllm_ext.simulation.cost.spec import build
from vllm_ext.simulation.cost.step_shape import StepShape
from vllm_ext.simulation.spec import SimulationSpec, resolve
from vllm_ext.simulation.workloads.build import GeneratedWorkload

_REQUESTS = 5000


class Estimate(NamedTuple):
    """Means of the requests, and what the server carries of such."""

    prompt_tokens: float
    output_tokens: float
    rate_per_s: float


def estimate(base: SimulationSpec, workload: GeneratedWorkload) -> Estimate | None:
    """Return what a full server would serve if every step were the mean step; None if it can serve no prompt at all.

    In each decode step a request of prompt p and output n holds its context, which is p n + n^2 / 2 tokens over its
    life, and one seat, n over its life. So at most ``1 / max(mean(p n + n^2 / 2) / KV tokens, mean(n) / seats)``
    requests begin and end per step, with the decodes and the prompt tokens that this means; the token budget may allow
    fewer. What that step takes is the cost model's. Of what the prefix cache saves and of preemptions nothing is known.

    Args:
        base: The server.
        workload: Single requests.
    """
    resolved = resolve(base)
    limits, kv_tokens = resolved.limits, resolved.num_blocks * base.engine.block_size
    lengths = [
        (one.prompt_tokens, max(1, min(one.output_tokens, one.max_tokens, limits.max_model_len - one.prompt_tokens)))
        for one in islice(workload.start(), _REQUESTS)
        if one.prompt_tokens < limits.max_model_len  # others are refused
    ]
    if not lengths:
        return None
    prompts, outputs = np.asarray(lengths, dtype=float).T
    prompt, output = prompts.mean(), outputs.mean()
    held = (prompts * outputs + outputs * outputs / 2).mean()
    per_step = min(kv_tokens / held, limits.max_num_seqs / output, limits.max_num_batched_tokens / (prompt + output))
    decodes, computed = per_step * output, per_step * prompt
    step = StepShape(
        num_requests=max(1, round(decodes + per_step)), num_tokens=max(1, round(decodes + computed)),
        num_decodes=round(decodes), num_sampled=max(1, round(decodes)), decode_context_tokens=round(per_step * held),
        prefill_context_tokens=round(computed), prefill_pairs=per_step * (prompts * prompts / 2).mean(),
    )  # fmt: skip
    cost = build(resolved.hardware, base.cost)
    per_step *= base.replicas
    return Estimate(float(prompt), float(output), float(per_step) / max(cost.device_s(step), cost.host_s(step)))
