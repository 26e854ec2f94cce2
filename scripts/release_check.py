#!/usr/bin/env python3
"""Install a wheel or a source archive in place of the checkout, and use it from another folder.

    python scripts/release_check.py dist/vllm_ext-0.1.0-py3-none-any.whl

Called by the environment's own Python, in which `make setup` has installed what is needed. Afterwards that environment
has the file in place of the checkout: `make setup` puts it back.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

CHECKS: Sequence[Sequence[str]] = (
    ("doctor",),
    ("plan", "--dataset", "fixed:512:128", "--rate", "2", "--num-requests", "60", "--loads", "1", "--model", "opt-13b",
     "--device", "a100-40", "--jobs", "2"),
    ("repro", "alise-table3", "--quick", "--jobs", "2", "--out", "result.json"),
)  # fmt: skip
"""Commands of vllm-ext that must end well."""


def check(archive: Path) -> None:
    """Install and try.

    Raises:
        SystemExit: something failed; its output is printed before.
    """
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall")
    _run("install", [*pip, str(archive.resolve())], Path.cwd())
    command = Path(sys.executable).with_name("vllm-ext")
    with tempfile.TemporaryDirectory() as elsewhere:
        for words in CHECKS:
            _run(" ".join(words[:2]), [str(command), *words], Path(elsewhere))
        where = f"import vllm_ext; assert vllm_ext.__file__.startswith({sys.prefix!r}), vllm_ext.__file__"
        _run("it is imported from there", [sys.executable, "-c", where], Path(elsewhere))


def _run(what: str, command: Sequence[str], folder: Path) -> None:
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    print(f"{'ok' if ran.returncode == 0 else 'FAILED'}  {what}", flush=True)
    if ran.returncode != 0:
        raise SystemExit(f"{ran.stdout[-4000:]}{ran.stderr[-4000:]}\n{what}: exit status {ran.returncode}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Install an archive of vllm-ext and use it from elsewhere.")
    parser.add_argument("archive", type=Path)
    check(parser.parse_args().archive)
