"""Prints the fingerprints of simulated runs; run by test_determinism in a process of another hash seed."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import sys
import types
from pathlib import Path


def main() -> None:
    folder = Path(__file__).resolve().parent
    # The tests are no package that could be imported from outside pytest; give their folder a name for this process.
    package = types.ModuleType("simulation_tests")
    package.__path__ = [str(folder)]
    sys.modules["simulation_tests"] = package
    with contextlib.redirect_stdout(io.StringIO()):
        tests = importlib.import_module("simulation_tests.test_determinism")
        logging.disable(logging.CRITICAL)
        found = tests.digests()
    print(found)


if __name__ == "__main__":
    main()
