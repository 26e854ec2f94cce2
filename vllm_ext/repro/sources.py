"""A checksum of the code that simulates: what other code simulated must not be taken for this one's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import vllm_ext
import vllm_ext.kernels
import vllm_ext.patches

PACKAGES: Mapping[str, Iterable[str]] = {
    "": vllm_ext.__path__,
    "kernels/": vllm_ext.kernels.__path__,
    "patches/": vllm_ext.patches.__path__,
}
"""Folders of source files, by where a wheel has them within `vllm_ext`; a checkout has two of them beside it."""
NOT_DECISIVE = ("cli", "cluster", "demo", "repro", "tiny_model")
"""Packages that nothing which simulates imports: how a run is asked for, where it runs, what is shown of it."""


def decisive_files(packages: Mapping[str, Iterable[str]] = PACKAGES) -> dict[str, Path]:
    """Return every module that can decide a simulation, by its path within `vllm_ext`, sorted."""
    found = {
        prefix + file.relative_to(folder).as_posix(): file
        for prefix, folders in packages.items()
        for folder in folders
        for file in Path(folder).rglob("*.py")
    }
    return {name: found[name] for name in sorted(found) if name.split("/")[0] not in NOT_DECISIVE}


def source_digest(packages: Mapping[str, Iterable[str]] = PACKAGES) -> str:
    """Return the checksum of `decisive_files`: of their names and their contents."""
    digest = hashlib.sha256()
    for name, file in decisive_files(packages).items():
        content = file.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:12]
