"""What a front end tells the predictor's process that it starts. Imports nothing heavy: both sides need it."""

from __future__ import annotations

import msgspec

CANNOT_START = 78
"""Exit status of the process when starting it again would not help."""


class WorkerOptions(msgspec.Struct, frozen=True):
    """One JSON text on the command line."""

    socket: str
    folder: str
    config: dict[str, object]
    """Fields of `PredictorConfig`."""
