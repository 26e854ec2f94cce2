"""Steps of our kernel on CUDA stay where they are, so that a captured graph computes what a later step asks for."""

from __future__ import annotations

from pathlib import Path

from tests.support.script import told


def test_a_captured_step_computes_whatever_the_builder_wrote_last() -> None:
    found = told(Path(__file__).with_name("own_steps_script.py"), TRITON_INTERPRET="1")
    assert sum("replayed" in case for case in found) == 4
    assert max(found.values()) < 1e-5, found
