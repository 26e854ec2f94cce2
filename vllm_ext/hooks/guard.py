"""Keeps what a part of ours raises within a request's way from failing the request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any


class Guard:
    """Runs one part's actions; the first exception is logged, and none is passed on."""

    def __init__(self, logger: logging.Logger, message: str) -> None:
        """Take where to log, and what it means for requests that the part failed."""
        self._logger = logger
        self._message = message
        self._logged = False

    def __call__(self, action: Callable[..., object], *args: Any) -> None:
        """Call the action; what it raises is logged once."""
        try:
            action(*args)
        except Exception:
            if not self._logged:
                self._logged = True
                self._logger.exception(self._message)
