"""Which commit a result was measured at, how old that commit is, and whether the sources are as committed.

A result below ``benchmarks/results`` names the commit that repeats it. So nothing is written there while a file that
could have decided the result differs from its commit. Results themselves, and pages made from them, decide nothing.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ext import envs

RESULTS = Path("benchmarks", "results")
"""Where a checkout keeps what was measured last."""
_WRITTEN = ("benchmarks/results/", "docs/reproductions.md", "docs/results/", "README.md")
"""What benchmarks write, and the pages made from it."""
_SOURCES = ("vllm_ext/", "kernels/", "patches/", "benchmarks/")
"""Where a file that git does not know can decide a result."""
_DIRTY = "-dirty"
_NAMED = 8


class UncommittedSources(OSError):
    """A result would name a commit that does not repeat it; the message names the files and the remedy."""


@dataclass(frozen=True, kw_only=True)
class CommitAge:
    """The commit of a result, seen from the present one."""

    commit: str
    """Abbreviated hash."""
    date: str
    """Day it was committed, ``YYYY-MM-DD``."""
    commits_since: int
    """How many commits the present one has that this one has not."""
    dirty: bool = False
    """Whether files differed from the commit when the result was measured."""

    def __str__(self) -> str:
        """For a table: ``4e646e9, 2026-10-11, 195 commits ago``."""
        plural = "" if self.commits_since == 1 else "s"
        return f"{_named(self.commit, self.dirty)}, {self.date}, {self.commits_since} commit{plural} ago"


def commit_age(result: Mapping[str, Any], root: Path) -> CommitAge | None:
    """Return the age of a result's commit at the present commit of a checkout.

    Args:
        result: The JSON object of a result.
        root: A folder of the checkout.

    Returns:
        None if the result names no commit, if git is absent, or if the checkout does not have the commit, as a shallow
        clone may not.
    """
    commit, dirty = _recorded(result)
    if not re.fullmatch("[0-9a-f]{4,40}", commit):
        return None
    return _age(commit, root, dirty=dirty)


def head_age(root: Path) -> CommitAge | None:
    """Return the present commit of a checkout; None where there is none."""
    commit = _git(root, "rev-parse", "--short", "HEAD")
    return None if commit is None else _age(commit.strip(), root)


def measured_at(result: Mapping[str, Any], root: Path) -> str:
    """Return a result's commit in words, with date and age where the checkout knows them."""
    commit, dirty = _recorded(result)
    return str(commit_age(result, root) or _named(commit or "unknown", dirty))


def _recorded(result: Mapping[str, Any]) -> tuple[str, bool]:
    recorded = str(result.get("versions", {}).get("commit", ""))
    return recorded.removesuffix(_DIRTY), recorded.endswith(_DIRTY)


def _named(commit: str, dirty: bool) -> str:
    return f"{commit} with uncommitted changes" if dirty else commit


def _age(commit: str, root: Path, *, dirty: bool = False) -> CommitAge | None:
    date = _git(root, "show", "--no-patch", "--format=%cs", f"{commit}^{{commit}}")
    since = _git(root, "rev-list", "--count", f"{commit}..HEAD")
    if date is None or since is None:
        return None
    return CommitAge(commit=commit[:7], date=date.strip(), commits_since=int(since), dirty=dirty)


def current_commit() -> str | None:
    """Return the abbreviated commit of the checkout that this package runs from; None when it runs from no checkout.

    It ends in ``-dirty`` when sources differ from the commit. Without a checkout it is what ``VLLM_EXT_COMMIT`` says.
    """
    root = _checkout()
    commit = None if root is None else _git(root, "rev-parse", "--short", "HEAD")
    if root is None or commit is None:
        return envs.commit() or None
    return commit.strip() + (_DIRTY if uncommitted(root) else "")


def uncommitted(root: Path) -> list[str]:
    """Return the files of a checkout that differ from its commit, and source files that are not part of it, sorted."""
    listed = _git(root, "status", "--porcelain", "-z", "--untracked-files=all", "--no-renames")
    found = []
    for entry in (listed or "").split("\0"):
        state, name = entry[:2], entry[3:]
        if not name or name.startswith(_WRITTEN):
            continue
        if state != "??" or (name.startswith(_SOURCES) and name.endswith(".py")):
            found.append(name)
    return sorted(found)


def check_committed(out: Path) -> None:
    """Refuse to write a result into ``benchmarks/results`` of the checkout while its sources are not committed.

    Raises:
        UncommittedSources: they are not; nothing is changed.
    """
    root = _checkout()
    if root is None or not out.resolve().is_relative_to(root / RESULTS):
        return
    if files := uncommitted(root):
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
