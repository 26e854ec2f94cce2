from concurrent.futures import Future
from typing import Any

import pytest

from vllm_ext.attention import counts
from vllm_ext.attention.counts import AttentionCounts, CountsReader
from vllm_ext.attention.plan import Kernel


def test_steps_and_tokens_by_kernel_and_format() -> None:
    found = AttentionCounts()
    found.add(Kernel.OWN, 100, "bfloat16", int8_tokens=40)
    found.add(Kernel.OWN, 10, "bfloat16")
    found.add(Kernel.STOCK, 5, "bfloat16")
    assert found.state() == {
        "steps": {"own": 2, "stock": 1},
        "tokens": {"own bfloat16": 70, "own int8": 40, "stock bfloat16": 5},
    }


class Workers:
    """An executor whose workers answer when they are told to."""

    def __init__(self, *, at_once: bool) -> None:
        self.asked: list[Future[list[dict[str, Any]]]] = []
        self.at_once = at_once

    def collective_rpc(self, method: Any, *, non_block: bool) -> Future[list[dict[str, Any]]]:
        assert (method, non_block) == (counts.worker_state, True)
        self.asked.append(Future())
        if self.at_once:
            self.answer(len(self.asked))
        return self.asked[-1]

    def answer(self, steps: int) -> None:
        self.asked[-1].set_result([{"steps": {"own": steps}, "tokens": {}}, {}])


def test_worker_of_this_process_answers_at_once() -> None:
    reader = CountsReader(Workers(at_once=True))
    assert [reader.read()["steps"] for _ in range(2)] == [{"own": 1}, {"own": 2}]


def test_worker_of_another_process_is_never_waited_for() -> None:
    workers = Workers(at_once=False)
    reader = CountsReader(workers)
    assert reader.read() == reader.read() == {"steps": {}, "tokens": {}}
    assert len(workers.asked) == 1, "asked again before it answered"
    workers.answer(7)
    assert reader.read()["steps"] == {"own": 7}
    assert len(workers.asked) == 2


def test_failed_answer_is_raised_and_then_asked_for_anew() -> None:
    workers = Workers(at_once=False)
    reader = CountsReader(workers)
    reader.read()
    workers.asked[-1].set_exception(RuntimeError("worker died"))
    with pytest.raises(RuntimeError, match="worker died"):
        reader.read()
