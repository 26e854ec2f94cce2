"""The error of a refused option: one line with its name, its value and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

KEY = "vllm_ext"
"""Key of our options in ``additional_config``."""


_SHOWN = 200
"""Characters of a refused value that a message shows."""


class ConfigError(ValueError):
    """An option of vllm-ext, or a field of a description, is unknown or has a value that is not allowed.

    Attributes:
        field: Dotted name below the root, such as ``prediction.window``; empty for the whole.
        value: The refused value.
        allowed: What is, as the end of a sentence.
        root: What the names are below: ``vllm_ext``, or nothing for a description.
    """

    def __init__(self, field: str, value: object, allowed: str, root: str = KEY) -> None:
        super().__init__(field, value, allowed, root)
        self.field = field
        self.value = value
        self.allowed = allowed
        self.root = root

    def __str__(self) -> str:
        return f"{'.'.join(filter(None, (self.root, self.field)))}={self.value!r:.{_SHOWN}}: {self.allowed}"


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` where one of the known names is close to what was given, else nothing."""
    close = difflib.get_close_matches(str(given), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
