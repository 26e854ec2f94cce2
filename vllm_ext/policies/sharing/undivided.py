"""No turns: all requests stand in one queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.contract import Origin, Sharing


@dataclass(frozen=True, kw_only=True)
class Undivided(Sharing):
    """Whoever sends most is served most."""

    uses_predictions: ClassVar[bool] = False
    divides: ClassVar[bool] = False

    def client(self, origin: Origin) -> str:
        """Return the same for all."""
        return ""
