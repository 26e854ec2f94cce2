"""Free memory between kept objects goes back to the system, which glibc by itself does at the end of a heap only."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from vllm_ext.predictor import free_memory

SCENE = """
import psutil
from vllm_ext.predictor import free_memory

def resident():
    return psutil.Process().memory_info().rss / 2**20

many = [bytes([number % 256]) * 3000 for number in range(40_000)]
kept = many[::100]
del many
held = resident()
free_memory.give_back()
print(held - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_what_is_free_between_kept_objects_is_given_back() -> None:
    """Of 114 MiB, in a process of its own: what else one has freed would be given back, too."""
    ended = subprocess.run([sys.executable, "-c", SCENE], capture_output=True, text=True, check=True)
    assert float(ended.stdout) > 80


def test_another_c_library_has_nothing_to_give_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory.ctypes, "CDLL", lambda name: object())
    free_memory._malloc_trim.cache_clear()
    free_memory.give_back()
    free_memory._malloc_trim.cache_clear()
