"""What all tests share: how long hypothesis searches. ``HYPOTHESIS_PROFILE=deep`` searches longer, with fresh seeds."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

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
