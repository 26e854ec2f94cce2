"""Copies may run on other cores than the thread that computes."""

from __future__ import annotations

import os
import threading

import pytest

from vllm_ext.kv.affinity import leave_the_engines_core


@pytest.mark.skipif(len(os.sched_getaffinity(os.getppid())) < 2, reason="needs two cores")
def test_a_thread_of_a_bound_one_is_let_go() -> None:
    found: list[set[int]] = []

    def bound() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        copies = threading.Thread(target=lambda: (leave_the_engines_core(), found.append(os.sched_getaffinity(0))))
        copies.start()
        copies.join()
        found.append(os.sched_getaffinity(0))

    engine = threading.Thread(target=bound)
    engine.start()
    engine.join()
    assert found[0] == os.sched_getaffinity(os.getppid())
    assert len(found[1]) == 1, "and the other one stays where it is"


def test_where_nothing_can_be_found_out_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)

    def refuse(process: int) -> set[int]:
        if process:
            raise PermissionError
        return before

    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    leave_the_engines_core()
    monkeypatch.undo()
    assert os.sched_getaffinity(0) == before
