"""Objects with the fields that a test needs of a configuration of vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any


def stub(defaults: Mapping[str, Any], **changed: Any) -> Any:
    """Return an object with these fields; ``part__field`` is a field of one of its parts.

    Raises:
        AssertionError: what is changed has no default.
    """
    assert changed.keys() <= defaults.keys(), f"{sorted(changed)}: must be among {sorted(defaults)}"
    made = SimpleNamespace()
    for path, value in {**defaults, **changed}.items():
        *parts, field = path.split("__")
        owner = made
        for part in parts:
            owner = vars(owner).setdefault(part, SimpleNamespace())
        setattr(owner, field, value)
    return made
