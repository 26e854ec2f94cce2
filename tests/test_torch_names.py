"""What runs on a GPU runs under PyTorch 2.11 as well, the oldest that vLLM's CUDA build was seen to load into.

The torch installed here is newer, so that a test which passes here may fail there. data/torch_after_2_11.txt lists the
public names that 2.13 has and 2.11 has not. To make it anew, print the names of both and compare:

    python tests/test_torch_names.py > names.txt
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("data") / "torch_after_2_11.txt"
ON_GPUS = (
    "kernels/**/*.py",
    "vllm_ext/**/*.py",
    "patches/**/*.py",
    "benchmarks/gpu/*.py",
    "scripts/gpu_*.py",
)
"""What runs on a machine with a GPU."""
MODULES = (
    "torch", "torch._dynamo", "torch.accelerator", "torch.autograd", "torch.backends.cuda", "torch.compiler",
    "torch.cuda", "torch.distributed", "torch.library", "torch.nn", "torch.nn.functional",
)  # fmt: skip
CLASSES = ("torch.Tensor", "torch.cuda.CUDAGraph", "torch.cuda.Event", "torch.cuda.Stream", "torch.dtype",
           "torch.library.Library", "torch.nn.Module")  # fmt: skip


def public_names() -> Iterator[str]:
    """Yield the public names of torch's modules and classes that are looked at."""
    for owner in (*MODULES, *CLASSES):
        module, _, name = owner.rpartition(".") if owner in CLASSES else (owner, "", "")
        found = importlib.import_module(module)
        yield from (f"{owner}.{member}" for member in dir(getattr(found, name) if name else found) if member[0] != "_")


def listed() -> frozenset[str]:
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def too_new(source: str, newer: frozenset[str]) -> set[str]:
    """Return the names of a list that a module uses: those of modules in full, members of classes on any object."""
    tree = ast.parse(source)
    meaning, used = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            meaning.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom) and node.module:
            named = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            meaning.update(named)
            used.update(named.values())
    chains = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for chain in chains:
        first, dot, rest = chain.partition(".")
        used.add(f"{meaning.get(first, first)}{dot}{rest}")
    members = {name for name in newer if name.rpartition(".")[0] in CLASSES}
    attributes = {chain.rpartition(".")[2] for chain in chains}
    return (newer & used) | {name for name in members if name.rpartition(".")[2] in attributes}


@pytest.mark.parametrize("pattern", ON_GPUS)
def test_no_name_is_newer_than_torch_2_11(pattern: str) -> None:
    files = sorted(ROOT.glob(pattern))
    assert files
    found = {str(path.relative_to(ROOT)): too_new(path.read_text(encoding="utf-8"), listed()) for path in files}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="the list is of names of torch 2.13")
def test_the_list_is_of_names_that_torch_has() -> None:
    assert listed() <= set(public_names())
    assert len(listed()) > 20


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch.accelerator.empty_host_cache()", "torch.accelerator.empty_host_cache"),
        ("import torch.nn.functional as F\nF.linear_cross_entropy(x)", "torch.nn.functional.linear_cross_entropy"),
        ("def f():\n    from torch import accelerator as a\n    a.Graph", "torch.accelerator.Graph"),
        ("from torch.compiler import set_default_backend", "torch.compiler.set_default_backend"),
        ("x.view(-1).const_data_ptr()", "torch.Tensor.const_data_ptr"),
    ],
)
def test_a_newer_name_is_found(source: str, name: str) -> None:
    assert too_new(source, listed()) == {name}


def test_names_that_2_11_has_pass() -> None:
    source = "import torch\ntorch.accelerator.synchronize()\ntorch.cuda.Stream().synchronize()\nother.Graph()"
    assert too_new(source, listed()) == set()


if __name__ == "__main__":
    print(*sorted(set(public_names())), sep="\n")
