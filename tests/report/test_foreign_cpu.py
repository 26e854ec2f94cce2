"""Whose cores are busy: the arithmetic, on numbers that are made up, and that own children count as own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_ext.report.foreign_cpu import ForeignCpu


def test_what_is_busy_and_not_ours_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(10.0, 100.0, 5.0), (20.0, 118.0, 11.0), (30.0, 100.0, 50.0)])
    monkeypatch.setattr(ForeignCpu, "_read", staticmethod(lambda: next(readings)))
    clock = ForeignCpu()
    assert clock.cores() == pytest.approx((18.0 - 6.0) / 10.0)
    assert clock.cores() == 0.0, "never negative"


def test_a_child_of_ours_is_ours() -> None:
    _, _, before = ForeignCpu._read()
    program = "import sys, time\nwhile time.process_time() < 0.5: pass\nprint(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        _, _, after = ForeignCpu._read()
        child.kill()
    assert after - before >= 0.4
