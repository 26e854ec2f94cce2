"""Which commit and sources a result was measured with, and whether the sources are as committed.

A result below ``benchmarks/results`` names the commit that repeats it, and a digest of the sources that decide it, by
which a commit that was rewritten since is found again. So nothing is written there while a file that could have
decided the result differs from its commit. Results themselves, and pages made from them, decide nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_ext import envs

RESULTS = Path("benchmarks", "results")
"""Where a checkout keeps what was measured last."""
_WRITTEN = ("benchmarks/results/", "docs/results/", "README.md")
"""What benchmarks write, and the pages made from it."""
_SOURCES = ("benchmarks/", "kernels/", "patches/", "vllm_ext/")
"""Where a file that git does not know can decide a result."""
_DECIDING = (".py", ".cpp", ".h")
"""Endings of the files in these folders that decide one."""
_DIRTY = "-dirty"
_DIGITS = 16
"""Hexadecimal digits of a digest that are kept."""
_NAMED = 8


class UncommittedSources(OSError):
    """A result would name a commit that does not repeat it; the message names the files and the remedy."""


def measured_at(result: Mapping[str, Any]) -> str:
    """Return the commit of a result and the day it was committed, as far as the result says: ``4e646e9, 2026-10-11``.

    Args:
        result: The JSON object of a result.
    """
    versions = result.get("versions", {})
    recorded = str(versions.get("commit", "unknown"))
    commit = f"{recorded.removesuffix(_DIRTY)} with uncommitted changes" if recorded.endswith(_DIRTY) else recorded
    return f"{commit}, {versions['committed']}" if "committed" in versions else commit


def current() -> dict[str, str]:
    """Return what identifies the sources this package runs from.

    Returns:
        ``commit``: abbreviated, ending in ``-dirty`` when sources differ from it; without a checkout, what
        ``VLLM_EXT_COMMIT`` says. ``committed``: the day, ``YYYY-MM-DD``. ``sources``: see `digest_of_files`. What is
        not known is left out: a package that was installed from a wheel knows nothing.
    """
    root = _checkout()
    commit = None if root is None else _git(root, "rev-parse", "--short", "HEAD")
    if root is None or commit is None:
        found = {"commit": envs.commit(), "sources": digest_of_files(Path(__file__).resolve().parents[2])}
    else:
        named = commit.strip() + (_DIRTY if uncommitted(root) else "")
        found = {"commit": named, "committed": committed_on(root, "HEAD"), "sources": digest_of_files(root)}
    return {name: value for name, value in found.items() if value}


def committed_on(root: Path, commit: str) -> str | None:
    """Return the day of a commit, ``YYYY-MM-DD``; None if the checkout does not have it."""
    day = _git(root, "show", "--no-patch", "--format=%cs", f"{commit}^{{commit}}")
    return None if day is None else day.strip()


def digest_of_files(root: Path) -> str | None:
    """Return the digest of the sources below a folder that decide a result.

    It is the beginning of the SHA-256 of one line for each file, ``name blob``, in the order of names; ``blob`` is what
    git calls the file's content, so that `digest_of_commit` is the same without reading a file.

    Returns:
        None where there are no benchmarks, as in an installed package.
    """
    if not (root / "benchmarks").is_dir():
        return None
    files = (path for folder in _SOURCES for path in (root / folder).rglob("*") if path.is_file())
    named = ((path.relative_to(root).as_posix(), path) for path in files)
    return _digest((name, _blob(path.read_bytes())) for name, path in named if _decides(name))


def digest_of_commit(root: Path, commit: str) -> str | None:
    """Return the digest of a commit's sources, see `digest_of_files`; None if the checkout does not have it."""
    listed = _git(root, "ls-tree", "-r", "-z", "--full-tree", f"{commit}^{{commit}}", *_SOURCES)
    if listed is None:
        return None
    entries = (entry.partition("\t") for entry in listed.split("\0") if entry)
    return _digest((name, described.split()[2]) for described, _, name in entries if _decides(name))


def _decides(name: str) -> bool:
    return name.endswith(_DECIDING) and not name.startswith(_WRITTEN)


def _digest(blobs: Iterable[tuple[str, str]]) -> str:
    lines = "".join(f"{name} {blob}\n" for name, blob in sorted(blobs))
    return hashlib.sha256(lines.encode()).hexdigest()[:_DIGITS]


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def misnamed(result: Mapping[str, Any], root: Path) -> str | None:
    """Return what is wrong with the sources that a kept result names, None if a commit of the checkout repeats it.

    A shallow clone cannot tell whether a commit exists: then only what the result says of itself is looked at.
    """
    versions = result.get("versions", {})
    commit, sources = str(versions.get("commit", "")), versions.get("sources")
    if not re.fullmatch("[0-9a-f]{7,40}", commit):
        return f"commit={commit!r}: must be the hash of a commit, without uncommitted changes"
    if not sources or "committed" not in versions:
        return f"sources={sources!r}, committed={versions.get('committed')!r}: must be said"
    if _is_shallow(root) or digest_of_commit(root, commit) == sources:
        return None
    if any(digest_of_commit(root, each) == sources for each in _history(root)):
        return None
    return f"commit={commit!r}: there is no such commit with sources {sources}"


def _is_shallow(root: Path) -> bool:
    return (_git(root, "rev-parse", "--is-shallow-repository") or "true").strip() == "true"


def _history(root: Path) -> Iterator[str]:
    yield from (_git(root, "rev-list", "HEAD") or "").split()


def uncommitted(root: Path) -> list[str]:
    """Return the files of a checkout that differ from its commit, and source files that are not part of it, sorted."""
    listed = _git(root, "status", "--porcelain", "-z", "--untracked-files=all", "--no-renames")
    found = []
    for entry in (listed or "").split("\0"):
        state, name = entry[:2], entry[3:]
        if not name or name.startswith(_WRITTEN):
            continue
        if state != "??" or (name.startswith(_SOURCES) and _decides(name)):
            found.append(name)
    return sorted(found)


def results_folder(out: Path) -> Path | None:
    """Return ``benchmarks/results`` of the checkout this package runs from if a path lies in it."""
    root = _checkout()
    if root is None or not out.resolve().is_relative_to(root / RESULTS):
        return None
    return root / RESULTS


def check_committed(out: Path) -> None:
    """Refuse to write a result into ``benchmarks/results`` of the checkout while its sources are not committed.

    Raises:
        UncommittedSources: they are not; nothing is changed.
    """
    folder = results_folder(out)
    if folder is not None and (files := uncommitted(folder.parents[1])):
        more = f" and {len(files) - _NAMED} more" if len(files) > _NAMED else ""
        raise UncommittedSources(
            f"{out}: a result in {RESULTS} names the commit that repeats it, but these files differ from their commit: "
            f"{', '.join(files[:_NAMED])}{more}. Commit them first, or write the result to another folder."
        )


def result_path(text: str) -> Path:
    """Return the path of an option that takes a result's file or folder, for argparse's ``type``.

    Raises:
        argparse.ArgumentTypeError: see `check_committed`. The option is refused before anything is measured.
    """
    path = Path(text)
    try:
        check_committed(path)
    except UncommittedSources as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def _checkout() -> Path | None:
    """Return the root of the checkout this module is a tracked file of."""
    here = Path(__file__).resolve()
    top = _git(here.parent, "rev-parse", "--show-toplevel")
    if top is None or _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    return Path(top.rstrip("\n")).resolve()


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints; None when it fails or is absent."""
    try:
        ran = subprocess.run(
            ["git", "--no-optional-locks", *arguments], cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return ran.stdout
