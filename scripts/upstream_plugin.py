"""A pytest plugin for vLLM's own tests: what makes a scheduler there makes ours, of one system.

Loaded by `conformance.py` in a process whose top-level package ``tests`` is vLLM's. The variables below say what to do:

    VLLM_EXT_UPSTREAM_SYSTEM   name in the systems table; empty: vLLM's own schedulers; "async": its AsyncScheduler in
                               place of both
    VLLM_EXT_UPSTREAM_ONLY     file with the ids of the tests to run, one a line; without it, all
    VLLM_EXT_UPSTREAM_RESULT   file that receives a JSON object: test id -> {"outcome", "schedulers", "message",
                               "traceback"}
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

SYSTEM = "VLLM_EXT_UPSTREAM_SYSTEM"
ONLY = "VLLM_EXT_UPSTREAM_ONLY"
RESULT = "VLLM_EXT_UPSTREAM_RESULT"
ASYNC = "async"

_MESSAGE_CHARS = 300
_TRACEBACK_CHARS = 3000


@dataclass
class Tested:
    """What became of one test."""

    outcome: str = "passed"
    """``passed``, ``failed`` or ``skipped``; a test that could not be set up failed."""
    schedulers: int = 0
    """Schedulers that it made: a test that makes none does not depend on the system."""
    message: str = ""
    """The line of a failure that says most."""
    traceback: str = ""
    """The failure, with the assertion: what an entry of the list has to explain."""


class Session:
    """Replaces the schedulers of a run of vLLM's tests, and writes down its outcomes."""

    def __init__(self, system: str, only: frozenset[str] | None, result: Path) -> None:
        self._only = only
        self._result = result
        self._tested: dict[str, Tested] = {}
        self._made = 0
        self._classes = replacements(system, self._count)

    def _count(self) -> None:
        self._made += 1

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Replace the classes where the tests have imported them, and leave out what is not to run."""
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "tests":
                replace_in(module, self._classes)
        if self._only is not None:
            left_out = [item for item in items if item.nodeid not in self._only]
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item.nodeid in self._only]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Begin to count."""
        self._made = 0
        self._tested[nodeid] = Tested()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember the worst phase."""
        found = self._tested[report.nodeid]
        found.schedulers = self._made
        if report.failed or (report.skipped and report.when != "teardown"):
            found.outcome = report.outcome
            found.message = last_line(report.longreprtext)
            found.traceback = report.longreprtext[-_TRACEBACK_CHARS:]

    def pytest_sessionfinish(self) -> None:
        """Write the outcomes."""
        found = {nodeid: asdict(tested) for nodeid, tested in self._tested.items()}
        self._result.write_text(json.dumps(found), encoding="utf-8")


def replacements(system: str, count: Callable[[], None]) -> Mapping[str, tuple[type[Any], type[Any]]]:
    """Return what takes the place of vLLM's schedulers: by name, vLLM's class and the other.

    Args:
        system: Its name, or what stands for a control, see above.
        count: Called whenever a scheduler is made.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    both = (Scheduler, AsyncScheduler)
    if system == ASYNC:
        return {real.__name__: (real, counted(AsyncScheduler, count)) for real in both}
    return {real.__name__: (real, steered(system, real, count) if system else counted(real, count)) for real in both}


def counted(real: type[Any], count: Callable[[], None]) -> type[Any]:
    """Return a scheduler that counts what is made of it. vLLM's own class stays as it is: ours looks at its source."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        count()
        real.__init__(self, *args, **kwargs)

    return type(real.__name__, (real,), {"__init__": __init__})


def steered(system: str, real: type[Any], count: Callable[[], None]) -> type[Any]:
    """Return our scheduler as a class that vLLM's tests can make: they know nothing of our options.

    Args:
        system: Its name.
        real: vLLM's class in whose place it is: the tests choose it, whatever vLLM makes of their configuration.
        count: Called whenever a scheduler is made.
    """
    from vllm_ext.hooks import registry
    from vllm_ext.scheduling.scheduler import SteeredScheduler

    registry.install("engine-core")  # tests that make no scheduler see vLLM as our engines do

    class UnderTest(SteeredScheduler):
        _upstream = real

        def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            vllm_config.additional_config = {"vllm_ext": {"system": system}}
            super().__init__(vllm_config, *args, **kwargs)

    return counted(UnderTest, count)


def replace_in(module: object, classes: Mapping[str, tuple[type[Any], type[Any]]]) -> None:
    """Let a module that has imported vLLM's schedulers find the others under their names."""
    for name, (real, other) in classes.items():
        if getattr(module, name, None) is real:
            setattr(module, name, other)


def last_line(text: str) -> str:
    """Return the line of a failure that says most: the first one of the error, else the last of all."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (errors[0] if errors else lines[-1])[:_MESSAGE_CHARS]


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """As in vLLM's top-level conftest, which is left out: it imports what runs models."""
    logger = logging.getLogger("vllm")
    before, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.INFO):
        yield caplog
    logger.propagate = before


def pytest_configure(config: pytest.Config) -> None:
    """Take the variables."""
    only = os.environ.get(ONLY)
    chosen = None if not only else frozenset(Path(only).read_text(encoding="utf-8").splitlines())
    config.pluginmanager.register(Session(os.environ.get(SYSTEM, ""), chosen, Path(os.environ[RESULT])))
