"""Which of vLLM's tests may not pass, under which system, and why: the list, and what it makes of outcomes.

The list is a TOML file of entries:

    [[differs]]
    systems = ["*"]                 # names of the table, "*" for all, or a control
    except = ["fcfs"]               # optional: "*" without these
    without = "torchvision"         # optional: the entry counts only where this module can't be imported
    says = "must be"                # optional: the first line of the failure holds this, or it is another failure
    why = "..."
    tests = ["tests/v1/core/test_scheduler.py::test_name", "...::test_other[case]"]

A name without brackets stands for all cases of a test. The list may only shrink: a test on it that passes is an error.
"""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

CONTROLS = {"vllm": "", "vllm-async": "async"}
"""Runs of vLLM's own schedulers, before the systems', by what the plugin calls them: as it is, and its AsyncScheduler,
which ours derives from, in place of both. What fails there says nothing about a system, and is left out of its run."""
EVERY = "*"
_KEYS = {"systems", "except", "without", "says", "why", "tests"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Tests that must differ, for one reason."""

    systems: tuple[str, ...]
    why: str
    tests: tuple[str, ...]
    excepted: tuple[str, ...] = ()
    without: str = ""
    says: str = ""

    def counts_for(self, system: str) -> bool:
        """Whether it is about this system or control, here."""
        if self.without and importlib.util.find_spec(self.without) is not None:
            return False
        if system in self.systems:
            return True
        return EVERY in self.systems and system not in (*CONTROLS, *self.excepted)


def read(path: Path) -> tuple[Entry, ...]:
    """Return the entries of a list.

    Raises:
        ValueError: An entry has no systems, tests or reason, or a key that is not known; names the entry.
    """
    found = []
    for number, raw in enumerate(tomllib.loads(path.read_text(encoding="utf-8")).get("differs", []), start=1):
        if unknown := raw.keys() - _KEYS:
            raise ValueError(f"{path.name}, entry {number}: {sorted(unknown)}; known are {sorted(_KEYS)}")
        if missing := [key for key in ("systems", "why", "tests") if not raw.get(key)]:
            raise ValueError(f"{path.name}, entry {number}: {missing} missing or empty")
        found.append(
            Entry(
                systems=tuple(raw["systems"]),
                why=raw["why"],
                tests=tuple(raw["tests"]),
                excepted=tuple(raw.get("except", ())),
                without=raw.get("without", ""),
                says=raw.get("says", ""),
            )
        )
    return tuple(found)


def matches(listed: str, test: str) -> bool:
    """Whether a name of the list stands for a test."""
    return test == listed or ("[" not in listed and test.partition("[")[0] == listed)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a suite under a system."""

    passed: int = 0
    differs: int = 0
    """Tests that failed, as the list says."""
    skipped: int = 0
    failed: tuple[str, ...] = ()
    """Tests that failed and are not on the list."""
    stale: tuple[str, ...] = ()
    """Tests that passed although they are on the list."""

    @property
    def unexpected(self) -> int:
        """How much of it is an error."""
        return len(self.failed) + len(self.stale)


def judge(outcomes: Mapping[str, Mapping[str, str]], system: str, entries: Iterable[Entry]) -> Verdict:
    """Return what the list makes of outcomes: ``outcome`` and ``message`` of `upstream_plugin.Tested`, by test id."""
    counting = [entry for entry in entries if entry.counts_for(system)]

    def on_list(test: str, message: str | None = None) -> bool:
        said = [entry for entry in counting if message is None or entry.says in message]
        return any(matches(name, test) for entry in said for name in entry.tests)

    failed = {test: found["message"] for test, found in outcomes.items() if found["outcome"] == "failed"}
    passed = [test for test, found in outcomes.items() if found["outcome"] == "passed"]
    return Verdict(
        passed=sum(not on_list(test) for test in passed),
        differs=sum(on_list(test, message) for test, message in failed.items()),
        skipped=len(outcomes) - len(failed) - len(passed),
        failed=tuple(test for test, message in failed.items() if not on_list(test, message)),
        stale=tuple(test for test in passed if on_list(test)),
    )


def unmatched(tests: Iterable[str], system: str, entries: Iterable[Entry]) -> list[str]:
    """Return names of the list that stand for no test at all: renamed, or gone."""
    known = list(tests)
    listed = [name for entry in entries if entry.counts_for(system) for name in entry.tests]
    return sorted({name for name in listed if not any(matches(name, test) for test in known)})
