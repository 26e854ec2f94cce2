#!/usr/bin/env python3
"""Make vLLM and this checkout importable on a machine where neither is installed, from the bundle of gpu_bundle.py.

    eval "$(python3 scripts/gpu_site.py .gpu/vllm.tar.xz)"          # then: python3 benchmarks/gpu/attention_gpu.py

Standard library only. Below a folder of its own it lays out the bundle and vllm-ext as an installed package, with the
entry points by which vLLM finds it, and says which environment variables processes need. Nothing is installed, and
nothing in the checkout changes. Exit status 3: the bundle is not there, or damaged.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import hashlib
import lzma
import os
import shlex
import shutil
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "vllm_ext"
SHIPPED_INSIDE = ("kernels", "patches")
"""Top-level folders that ship inside of the package; see setup.py."""
_SHIPPED = ((PACKAGE, ""), *((name, name) for name in SHIPPED_INSIDE))
"""Folders of the checkout, and where in the package they go."""
_COMPILED = "__pycache__"
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
        folder: Receives both, and Triton's cache. What lies there already is left as it is: other processes may use it.

    Raises:
        SiteError: the bundle is not there, or damaged; nothing of it is left behind.
        OSError: the folder can't be written.
    """
    if bundle is None:
        return dict(ENGINE)
    site = unpack(bundle, folder)
    return {
        **ENGINE,
        # Ours first: its distribution is found there. The benchmarks last: they import each other, and below
        # PYTHONSAFEPATH Python does not look beside a script.
        **search_path(install(checkout, folder), site, checkout / "benchmarks" / "gpu"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        # The bundle has no FlashInfer; vLLM's sampler would import it before it asks.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }


def search_path(*folders: Path) -> dict[str, str]:
    """Return the variables by which Python imports from these folders, and then from where it was told to before."""
    before = [name for name in os.environ.get("PYTHONPATH", "").split(os.pathsep) if name]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys((*map(str, folders), *before))),
        # Else `python -m` takes the checkout's package, which has no kernels.
        "PYTHONSAFEPATH": "1",
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
    try:
        with made_at_once(site) as scratch:
            with tarfile.open(bundle, "r:xz") as tar:
                tar.extractall(scratch, filter="data")
            compileall.compile_dir(scratch, quiet=2, workers=0, stripdir=scratch, prependdir=site)
    except (EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise SiteError(f"bundle={bundle}: damaged ({error}); make it again with scripts/gpu_bundle.py") from error
    return site


@contextlib.contextmanager
def made_at_once(folder: Path) -> Iterator[Path]:
    """Give a folder to fill, which then appears under its name; one that another process made by then is kept.

    After an error nothing is left behind.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield scratch
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def install(checkout: Path, folder: Path) -> Path:
    """Copy a checkout's package below a folder, as pip would install it; returns where it is, by what it holds.

    Raises:
        SiteError: it is no checkout of this project.
    """
    try:
        project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
        version = _version((checkout / PACKAGE / "__init__.py").read_text())
    except (OSError, KeyError) as error:
        raise SiteError(f"checkout={checkout}: no checkout of vllm-ext ({error})") from error
    site = folder / f"vllm-ext-{_digest(checkout)}"
    if site.is_dir():
        return site
    with made_at_once(site) as scratch:
        for source, target in _SHIPPED:
            shutil.copytree(checkout / source, scratch / PACKAGE / target, ignore=shutil.ignore_patterns(_COMPILED))
        info = scratch / f"{PACKAGE}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(_entry_points(project))
    return site


def _digest(checkout: Path) -> str:
    """Return a key of all that is copied of a checkout, and of what its metadata comes from."""
    key = hashlib.sha256()
    for path in (checkout / "pyproject.toml", *(checkout / source for source, _ in _SHIPPED)):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and _COMPILED not in file.parts:
                data = file.read_bytes()
                key.update(f"{file.relative_to(checkout)}\0{len(data)}\0".encode() + data)
    return key.hexdigest()[:16]


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
