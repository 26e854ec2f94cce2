"""Admit a prompt only if all of it fits into the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.contract import Candidate, Demand, GatePolicy, Step, Victim


@dataclass(frozen=True, kw_only=True)
class WholePrompts(GatePolicy):
    """Let prompts join uncut: what is missing of one must fit into what the step's token budget leaves.

    A prompt longer than a step can ever hold joins as the only new one of its step, in chunks of the whole budget: with
    vLLM's ``--max-num-batched-tokens`` of at least ``--max-model-len`` there is none.

    Source: Sarathi-Serve, section 5.2 and Table 4, ablation "hybrid-batching-only"; this is how Orca and vLLM 0.2
    batch, and AccelGen's ablation /Chunk.
    """

    uses_predictions: ClassVar[bool] = False

    def gate(self, step: Step) -> _WholePromptsGate:
        """Return the gate of a step."""
        return _WholePromptsGate(step.token_budget, step.free_tokens)


class _WholePromptsGate:
    name = "whole_prompts"
    closed = False

    def __init__(self, most_tokens: int, free_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._free_tokens = free_tokens
        self._first = True

    def fits(self, candidate: Candidate, demand: Demand, leaving: Sequence[Victim]) -> bool:
        return demand.tokens <= self._free_tokens or (demand.tokens > self._most_tokens and self._first)

    def take(self, candidate: Candidate, demand: Demand, leaving: Sequence[Victim]) -> None:
        self._free_tokens -= demand.tokens
        self._first = False
