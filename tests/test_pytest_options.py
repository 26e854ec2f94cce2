"""pytest knows every option that pyproject.toml gives it, and runs without the plugins that some of them are for.

Not by ``--strict-config``: on a machine with pytest alone, as one with a GPU may be, it would refuse to run at all.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.extent import HANG_S

ROOT = Path(__file__).parents[1]
A_SMALL_TEST = str(Path(__file__).relative_to(ROOT))
WITHOUT_PLUGINS = ("-p", "no:asyncio", "-p", "no:timeout", "-p", "no:xdist", "-p", "no:hypothesispytest")


def collect(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pytest", "--collect-only", "-q", *arguments, A_SMALL_TEST]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)


def test_all_options_are_known() -> None:
    done = collect("--strict-config")
    assert done.returncode == 0, done.stderr


def test_an_unknown_option_would_be_found() -> None:
    done = collect("--strict-config", *WITHOUT_PLUGINS)
    assert done.returncode != 0
    assert "Unknown config option: asyncio" in done.stderr


def test_pytest_runs_without_its_plugins() -> None:
    done = collect(*WITHOUT_PLUGINS)
    assert done.returncode == 0, done.stderr
    assert A_SMALL_TEST in done.stdout
