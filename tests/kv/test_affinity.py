"""Copies may run on other cores than the thread that computes, and on none that the user did not allow."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from tests.support.extent import HANG_S
from vllm_ext.kv.host import affinity

CORES = frozenset(os.sched_getaffinity(0))
needs_two = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


def where_copies_run(bound_to: set[int]) -> tuple[set[int], set[int]]:
    """Bind a thread as vLLM binds an engine's; return where one that it starts runs then, and where itself does."""
    found: list[set[int]] = []

    def bound() -> None:
        os.sched_setaffinity(0, bound_to)
        copies = threading.Thread(
            target=lambda: (affinity.leave_the_engines_core(), found.append(os.sched_getaffinity(0)))
        )
        copies.start()
        copies.join()
        found.append(os.sched_getaffinity(0))

    engine = threading.Thread(target=bound)
    engine.start()
    engine.join()
    return found[0], found[1]


@needs_two
def test_a_thread_of_a_bound_one_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "_allowed", None)
    affinity.note_allowed_cores()
    one = {min(CORES)}
    assert where_copies_run(one) == (CORES, one), "and the other one stays where it is"


@needs_two
def test_only_the_first_note_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin is loaded again with a second engine in the process, whose main thread is bound by then."""
    monkeypatch.setattr(affinity, "_allowed", CORES)
    thread = threading.Thread(target=lambda: (os.sched_setaffinity(0, {min(CORES)}), affinity.note_allowed_cores()))
    thread.start()
    thread.join()
    assert affinity._allowed == CORES


@needs_two
def test_copies_of_an_engine_in_the_users_process_stay_where_the_user_put_it() -> None:
    """They went where the process that started it may run: under ``taskset`` a shell, which may run anywhere."""
    program = (
        "import os, vllm_ext.plugin; vllm_ext.plugin.register()\n"
        "from vllm_ext.kv.host.affinity import leave_the_engines_core\n"
        "leave_the_engines_core(); print(sorted(os.sched_getaffinity(0)))"
    )
    core = min(CORES)
    started = subprocess.run(
        ["taskset", "-c", str(core), sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_S,
    )
    assert started.stdout.splitlines()[-1] == f"[{core}]"


def test_where_nothing_was_noted_or_the_kernel_refuses_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "_allowed", None)
    affinity.leave_the_engines_core()
    monkeypatch.setattr(affinity, "_allowed", CORES | {max(CORES) + 10_000})

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    affinity.leave_the_engines_core()
    assert os.sched_getaffinity(0) == CORES
