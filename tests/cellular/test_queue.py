"""The queue of ready nodes does what a sorted list does."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.cellular.queue import ReadyQueue

Operations = st.lists(
    st.tuples(
        st.sampled_from(["push", "one by one", "drop", "remove"]), st.lists(st.integers(0, 20), min_size=1, max_size=40)
    ),
    max_size=30,
)


@given(Operations)
def test_queue_agrees_with_a_sorted_list(operations: list[tuple[str, list[int]]]) -> None:
    queue, model, number = ReadyQueue(), [], 0
    for what, values in operations:
        if what in ("push", "one by one"):
            nodes = np.arange(number, number + len(values))
            if what == "push":
                queue.push(nodes, np.array(values, float))
            else:
                for node, key in zip(nodes.tolist(), values, strict=True):
                    queue.push_one(node, float(key))
            model += zip(map(float, values), nodes.tolist(), strict=True)
            model.sort(key=lambda pair: pair[0])
            number += len(values)
        elif what == "drop":
            places = sorted({value for value in values if value < len(model)})
            queue.drop(np.array(places, np.int64))
            model = [pair for place, pair in enumerate(model) if place not in places]
        else:
            gone = [model[value] for value in {*values} if value < len(model)] + [(3.0, -1)]
            queue.remove(np.array([node for _, node in gone]), np.array([key for key, _ in gone]))
            model = [pair for pair in model if pair not in gone]
        assert queue.nodes.tolist() == [node for _, node in model]
        assert queue.keys.tolist() == [key for key, _ in model]


def test_first_skips_what_is_not_allowed() -> None:
    queue = ReadyQueue()
    queue.push(np.arange(100), np.arange(100.0))
    assert queue.first(3, lambda nodes: nodes % 20 == 19).tolist() == [19, 39, 59]
    assert queue.first(200, lambda nodes: nodes >= 0).tolist() == list(range(100))
