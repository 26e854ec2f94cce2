#!/usr/bin/env python3
"""Make vLLM and this checkout importable on a machine where neither is installed, from the bundle of gpu_bundle.py.

    eval "$(python3 scripts/gpu_site.py .gpu/vllm.tar.xz)"          # then: python3 benchmarks/attention_gpu.py

Standard library only. Below a folder of its own it lays out the bundle and vllm-ext as an installed package, with the
entry points by which vLLM finds it, and says which environment variables processes need. Nothing is installed, and
nothing in the checkout changes. Exit status 3: the bundle is not there, or damaged.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import hashlib
import lzma
import os
import shlex
import shutil
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "vllm_ext"
SHIPPED_INSIDE = ("kernels", "patches")
"""Top-level folders that ship inside of the package; see setup.py."""
ENGINE: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Of every engine here: no network, and one process, so that errors are seen and nothing is left behind."""


class SiteError(Exception):
    """What went wrong and what to do about it, in one line."""


def lay_out(bundle: Path | None, checkout: Path, folder: Path) -> dict[str, str]:
    """Lay out vLLM and a checkout of vllm-ext, and return the environment variables that processes need to use them.

    Args:
        bundle: Made by gpu_bundle.py; None where vLLM and vllm-ext are installed, and nothing has to be laid out.
        checkout: Of this repository.
        folder: Receives both, and Triton's cache. A bundle that lies there already is not unpacked again; the checkout
            is copied anew.

    Raises:
        SiteError: the bundle is not there, or damaged; nothing of it is left behind.
        OSError: the folder can't be written.
    """
    if bundle is None:
        return dict(ENGINE)
    site = unpack(bundle, folder)
    ours = install(checkout, folder / "vllm-ext")
    return {
        **ENGINE,
        # Ours first: its distribution is found there. The benchmarks last: they import each other, and below
        # PYTHONSAFEPATH Python does not look beside a script.
        "PYTHONPATH": os.pathsep.join(map(str, (ours, site, checkout / "benchmarks"))),
        # Else `python -m` takes the checkout's package, which has no kernels.
        "PYTHONSAFEPATH": "1",
        "TRITON_CACHE_DIR": str(folder / "triton"),
        # The bundle has no FlashInfer; vLLM's sampler would import it before it asks.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }


def unpack(bundle: Path, folder: Path) -> Path:
    """Unpack a bundle below a folder, and compile its modules on all cores; returns where it is.

    Raises:
        SiteError: it is not there, or damaged.
    """
    try:
        with bundle.open("rb") as file:
            site = folder / f"site-{hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"
    except OSError as error:
        raise SiteError(f"bundle={bundle}: {error.strerror}; make it with scripts/gpu_bundle.py") from error
    if site.is_dir():
        return site
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".site-", dir=folder))
    try:
        with tarfile.open(bundle, "r:xz") as tar:
            tar.extractall(scratch, filter="data")
        compileall.compile_dir(scratch, quiet=2, workers=0, stripdir=scratch, prependdir=site)
        scratch.rename(site)
    except (EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise SiteError(f"bundle={bundle}: damaged ({error}); make it again with scripts/gpu_bundle.py") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return site


def install(checkout: Path, folder: Path) -> Path:
    """Copy a checkout's package to a folder, as pip would install it; returns the folder.

    Raises:
        SiteError: it is no checkout of this project.
    """
    try:
        project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
        version = _version((checkout / PACKAGE / "__init__.py").read_text())
    except (OSError, KeyError) as error:
        raise SiteError(f"checkout={checkout}: no checkout of vllm-ext ({error})") from error
    shutil.rmtree(folder, ignore_errors=True)
    for source, target in ((PACKAGE, ""), *((name, name) for name in SHIPPED_INSIDE)):
        shutil.copytree(checkout / source, folder / PACKAGE / target, ignore=shutil.ignore_patterns("__pycache__"))
    info = folder / f"{PACKAGE}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(_entry_points(project))
    return folder


def _version(source: str) -> str:
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise KeyError("__version__")


def _entry_points(project: Mapping[str, Any]) -> str:
    groups: Mapping[str, Mapping[str, str]] = project["entry-points"]
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the variables for a shell to evaluate; return 0, 2 for a wrong command line, or 3 without a bundle."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path, help="made by scripts/gpu_bundle.py")
    default = Path(tempfile.gettempdir(), "vllm-ext-site")
    parser.add_argument("--folder", type=Path, default=default, help=f"receives it (default: {default})")
    options = parser.parse_args(argv)
    try:
        environment = lay_out(options.bundle, ROOT, options.folder)
    except (SiteError, OSError) as error:
        print(f"gpu-site: error: {error}", file=sys.stderr)
        return 3
    for name, value in environment.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
