"""The benchmark of attention: all subjects compute the same step, a wrong output ends it, and ratios are of turns."""

from __future__ import annotations

from importlib import import_module as script
from typing import Any

import numpy as np
import pytest
import torch
from vllm.platforms import current_platform

from vllm_ext.report.timing import check_output

current_platform.import_kernels()


@pytest.fixture
def step() -> Any:
    subjects = script("attention_subjects")
    return subjects.Step(subjects.Shape(batch=2, query=8, context=256), seed=0, contiguous=True)


def test_every_subject_computes_the_same_step(step: Any) -> None:
    expected = step.contiguous_kv()().float().clone()
    for name in ("own", "stock", "copied_out", "single_tokens"):
        check_output(name, getattr(step, name)()(), expected)
    mixed = step.unpacked(0.5)().float().clone()
    check_output("own", step.own(0.5)(), mixed)
    check_output("two_passes", step.two_passes(0.5)(), mixed)
    assert not torch.equal(mixed, expected), "nothing was in INT8"


def test_step_with_poisoned_pages_shows_that_records_are_read(step: Any) -> None:
    """Of what is in INT8, the pages are not looked at."""
    expected = step.own(0.5)().clone()
    step.cache[step.table[step.is_int8(0.5)].long()] = float("nan")
    assert torch.equal(step.own(0.5)(), expected)
    assert step.stock()().isnan().any()


def test_output_that_is_off_ends_the_benchmark(step: Any) -> None:
    expected = step.contiguous_kv()().float().clone()
    step.table.copy_(step.table.flip(0))  # each request reads the other's KV
    with pytest.raises(RuntimeError, match="own: the output is off by"):
        script("attention").check_all({"own": step.own()}, {}, expected)


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)])
def test_share_of_int8_is_spread_evenly(step: Any, share: float, count: int) -> None:
    found = step.is_int8(share)
    assert found.sum(1).tolist() == [count, count]
    halves = found[:, :4].sum(1) - found[:, 4:].sum(1)
    assert not halves.any()


def test_bytes_are_those_of_pages_and_records(step: Any) -> None:
    page, record = 32 * 8 * 2 * 128 * 2, 32 * 8 * 2 * 128 + 2 * 2 * 8 * 2 * 128
    assert [step.bytes_read(share) for share in (0.0, 0.5, 1.0)] == [16 * page, 8 * (page + record), 16 * record]


def test_ratio_compares_turns_and_not_medians() -> None:
    """A machine that is slow for a while is slow for both."""
    slow = np.array([1.0, 1.0, 10.0, 10.0, 1.0])
    assert script("attention").ratio({"a": 2 * slow, "b": slow}, "a", "b") == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    "argv", [["--contexts", "100"], ["--contexts", "256"], ["--threads", "2"], ["--repeats", "0"], ["--batch", "0"]]
)
def test_senseless_arguments_are_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        script("attention").arguments(argv)
