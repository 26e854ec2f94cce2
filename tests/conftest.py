"""What all tests share: which run (see extent.py) and how long hypothesis searches.

``HYPOTHESIS_PROFILE=deep`` searches longer, with fresh seeds. Tests whose examples are dear take fewer, see extent.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.support.extent import FULL

_SLOW_DATA = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile(
    "ci",
    max_examples=40,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    print_blob=True,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],  # "explain" traces every line: minutes
    suppress_health_check=_SLOW_DATA,
)
settings.register_profile(
    "deep",
    settings.get_profile("ci"),
    max_examples=400,
    stateful_step_count=100,
    derandomize=False,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def vllms_log_level() -> Iterator[None]:
    """Commands lower vLLM's log level for the rest of their process, which here has other tests to run."""
    logger = logging.getLogger("vllm")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def quiet_vllm(vllms_log_level: None) -> None:
    """VLLM announces every configuration, pause and cache reset: thousands of lines in a property test."""
    import vllm.logger  # which configures the logger when it is first imported

    logging.getLogger(vllm.logger.__name__.partition(".")[0]).setLevel(logging.CRITICAL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked ``full``, unless everything is to be tried."""
    left_out = [] if FULL else [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
