"""Lets a server's copies of KV end by steps (`by_steps`): imported by its engine, see `servers`."""

from __future__ import annotations

import by_steps

by_steps.hold_copies()
