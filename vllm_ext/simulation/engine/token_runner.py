"""A model runner without a model, for long runs: no books of its own, only tokens and the shape of each step.

The tests' own runner checks a scheduler as a GPU would suffer from it, and costs more than the scheduler itself. This
one trusts the scheduler (the conformance suite earns that) and reads its requests directly, in one pass per step.
"""

from __future__ import annotations

from collections.abc import Mapping

from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.request import Request

from vllm_ext.kv.partial_prefix.layout import GapLayout
from vllm_ext.simulation.cost.step_shape import EMPTY_SHAPE, StepShape
from vllm_ext.simulation.workloads.token_ids import EOS_TOKEN_ID as EOS_TOKEN_ID
from vllm_ext.simulation.workloads.token_ids import FILLER_TOKEN_ID as FILLER_TOKEN_ID
from vllm_ext.simulation.workloads.token_ids import output_ids as output_ids

_NO_GAPS: Mapping[str, GapLayout] = {}
_FILLER, _END, _NONE = [FILLER_TOKEN_ID], [EOS_TOKEN_ID], list[int]()


class TokenRunner:
    """Fabricates the output of each step and measures its shape.

    Args:
        output_lengths: Hidden true output length by request id; the end token comes at that length.
    """

    def __init__(self, output_lengths: Mapping[str, int]) -> None:
        self._output_lengths = output_lengths

    def execute(
        self, scheduled: Mapping[str, int], requests: Mapping[str, Request], gaps: Mapping[str, GapLayout] = _NO_GAPS
    ) -> tuple[ModelRunnerOutput, StepShape]:
        """Run one step, right after it was scheduled.

        Args:
            scheduled: Its tokens, by request.
            requests: The scheduler's requests by id, as they are after ``schedule()``.
            gaps: Where the tokens of requests with gaps lie.

        Returns:
            One token for each request whose context is complete after this step, none for a partial prefill; and
            what the step consists of.
        """
        if not scheduled:
            return EMPTY_MODEL_RUNNER_OUTPUT, EMPTY_SHAPE
        lengths = self._output_lengths
        total = 0
        sampled: list[list[int]] = []
        num_decodes = num_sampled = decode_context = prefill_context = 0
        pairs = 0.0
        for req_id, num_tokens in scheduled.items():
            request = requests[req_id]
            end = request.num_computed_tokens
            total += num_tokens
            if num_tokens == 1:
                num_decodes += 1
                decode_context += end
            elif req_id in gaps:
                for start, behind in gaps[req_id].spans(end - num_tokens, num_tokens):
                    prefill_context += behind
                    pairs += (behind - start) * (behind - (behind - start - 1) / 2)
            else:
                prefill_context += end
                pairs += num_tokens * (end - (num_tokens - 1) / 2)
            if request.is_prefill_chunk:
                sampled.append(_NONE)
            else:
                num_sampled += 1
                # The token that follows position `end` is output number `end - prompt` (from 0).
                sampled.append(_END if end - request.num_prompt_tokens + 1 == lengths[req_id] else _FILLER)
        req_ids = list(scheduled)
        model_output = ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index=dict(zip(req_ids, range(len(req_ids)), strict=True)),
            sampled_token_ids=sampled,
        )
        return model_output, StepShape(
            len(req_ids), total, num_decodes, num_sampled, decode_context, prefill_context, pairs
        )
