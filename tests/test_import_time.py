"""Importing the package costs nothing worth mentioning: judged by what gets imported, not by the clock."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.extent import HANG_S

HEAVY = ("vllm", "torch", "numpy", "transformers", "sentence_transformers", "pydantic", "scipy")


def heavy_modules_after(code: str) -> set[str]:
    """Run the code in a fresh interpreter and return which heavy modules it left imported."""
    program = f"{code}\nimport sys, json; print('\\n' + json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=HANG_S)
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import vllm_ext",
        "import vllm_ext.plugin",
        "import vllm_ext.patches, vllm_ext.kernels",
        "import vllm_ext.cli.main",
        "from vllm_ext.cli.main import main\ntry:\n main(['--help'])\nexcept SystemExit: pass",
    ],
    ids=["package", "plugin module", "patches and kernels", "command", "command's help"],
)
def test_nothing_heavy_is_imported(code: str) -> None:
    assert heavy_modules_after(code) == set()


def test_the_check_sees_a_heavy_import() -> None:
    assert heavy_modules_after("import numpy") == {"numpy"}


def test_list_of_reproductions_imports_neither_vllm_nor_torch() -> None:
    assert heavy_modules_after("from vllm_ext.cli.repro import main; main(['--list'])") <= {"numpy", "pydantic"}
