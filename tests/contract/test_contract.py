"""The contract: what a policy may declare of itself, and which plans and ranks are refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from vllm_ext.contract import NO_PLAN, Batch, Pool, Rank, RequestView, Split, StepPlan, check_rank
from vllm_ext.systems.alise import Preemptive
from vllm_ext.systems.upstream import InOrder, StaticBudget


def test_an_undeclared_class_variable_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(TypeError, match=r"^Mine\.preemts: a policy may declare .*\bpreempts\b.*; parameters need"):

        class Mine(InOrder):
            preemts: ClassVar[bool] = True

    with pytest.raises(TypeError, match=r"Bare\.preemts"):

        class Bare(InOrder):
            preemts = True

    with pytest.raises(TypeError, match=r"Elsewhere\.stall_free"):

        class Elsewhere(InOrder):  # a budget may declare that, an admission may not
            stall_free: ClassVar[bool] = True

    with pytest.raises(TypeError, match=r"NoField\.priced"):

        class NoField(Preemptive):  # a new default needs the annotation, or it is none
            priced = False


def test_declared_variables_parameters_and_methods_are_fine() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mine(StaticBudget):
        stall_free: ClassVar[bool] = True
        uses_predictions = True
        tokens: int = 3
        _private = 4

        @property
        def twice(self) -> int:
            return 2 * self.tokens

        def helper(self) -> int:
            return self.twice

    policy = Mine(tokens=5)
    assert (StaticBudget().stall_free, InOrder().preempts) == (False, False), "what is not declared the base says"
    assert (policy.stall_free, policy.uses_predictions, policy.helper()) == (True, True, 10)


@pytest.mark.parametrize("ids", [["a"], "a", (1,), ({"req_id": "a"},), None], ids=str)
def test_a_plan_names_requests_by_tuples_of_ids(ids: Any) -> None:
    with pytest.raises(TypeError, match=r"preempt=.*must be a tuple of request ids"):
        StepPlan(admit=("w",), preempt=ids)
    if ids is not None:
        with pytest.raises(TypeError, match=r"admit=.*must be a tuple of request ids"):
            StepPlan(admit=ids)


def test_a_plan_that_preempts_names_who_is_admitted() -> None:
    with pytest.raises(ValueError, match="must name who is admitted"):
        StepPlan(preempt=("r",))
    assert StepPlan(admit=(), preempt=("r",)).restricts


@pytest.mark.parametrize("tokens", [1.5, 64.0, True, "64", np.float64(64)], ids=repr)
def test_a_budget_is_a_whole_number_of_tokens(tokens: Any) -> None:
    with pytest.raises(TypeError, match="must be a whole number of tokens, or None"):
        Split(tokens=tokens)


def test_what_is_no_split_is_refused() -> None:
    not_a_split: Any = 512
    with pytest.raises(TypeError, match="a budget policy must return a Split"):
        StepPlan(split=not_a_split)


@pytest.mark.parametrize(
    ("plan", "restricts"),
    [
        (NO_PLAN, False),
        (StepPlan(split=Split()), False),
        (StepPlan(admit=()), True),
        (StepPlan(split=Split(tokens=0)), True),
        (StepPlan(split=Split(prefill=False)), True),
        (StepPlan(split=Split(apart=True)), True),
    ],
)
def test_a_plan_restricts_whatever_it_keeps_vllm_from(plan: StepPlan, restricts: bool) -> None:
    assert plan.restricts is restricts


@pytest.mark.parametrize(
    ("rank", "error"),
    [
        (Rank((math.nan,)), ValueError),
        (Rank((0.0,), until_s=math.nan), ValueError),
        (Rank((0.0,), until_tokens=math.nan), ValueError),
        (Rank((0.0,), older_only_s=math.nan), ValueError),
        (Rank(("first",)), TypeError),  # type: ignore[arg-type]
        (Rank((None,)), TypeError),  # type: ignore[arg-type]
    ],
)
def test_a_rank_that_would_break_the_queue_is_refused(rank: Rank, error: type[Exception]) -> None:
    check_rank(Rank((1, 2.5, -math.inf)))
    with pytest.raises(error):
        check_rank(rank)


def test_blocks_of_sequences_by_hand() -> None:
    """Groups of 16 and of 32 tokens, 3 tokens of drafts, cut at 100."""
    pool = Pool(total=9, unused=9, free=9, block_sizes=(16, 32), lookahead_tokens=3, max_model_len=100)
    assert pool.block_size == 16
    assert [pool.blocks_for(n) for n in (1, 13, 14, 97, 500)] == [1 + 1, 1 + 1, 2 + 1, 7 + 4, 7 + 4]
    assert pool.blocks_for(14, drafts=False) == 2
    assert pool.blocks_of(np.array([1, 13, 14, 97, 500])) == 2 + 2 + 3 + 11 + 11
    column = np.array([10])
    assert Batch(column, column, np.array([4]), np.array([7])).bound.tolist() == [13]


def test_what_is_cached_is_not_missing() -> None:
    request = RequestView("w", 0.0, 100, 5)
    views = request, request._replace(cached_tokens=64), request._replace(num_computed_tokens=80, cached_tokens=64)
    assert [view.missing_tokens for view in views] == [105, 41, 25]
