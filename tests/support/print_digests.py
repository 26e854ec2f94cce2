"""Prints the fingerprints of decisions and of simulated runs; run by test_hash_seed with another hash seed."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import sys
import types
from pathlib import Path


def main() -> None:
    # The tests are no package that could be imported from outside pytest; give their folder a name for this process.
    package = types.ModuleType("tests")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["tests"] = package
    with contextlib.redirect_stdout(io.StringIO()):
        modules = [importlib.import_module(name) for name in ("tests.support.digests", "tests.support.run_digests")]
        logging.disable(logging.CRITICAL)
        found = [module.digests() for module in modules]
    print("\n".join(found))


if __name__ == "__main__":
    main()
