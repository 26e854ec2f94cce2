"""Whether a replica's engine serves, known by asking it again and again; and what routers are told of it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

REPORT, AGE, ILL, FAILED = "vllm_ext", "vllm_ext_age_s", "vllm_ext_ill", "vllm_ext_failed"
"""Names in a replica's routing statistics: of its report, of how old that is, of why none should be sent anything, and
of how many requests in a row have failed there."""


class Health:
    """What is known of a replica's engine by asking it again and again.

    Args:
        ask: Returns the engine's report; may raise, or not return.
        report_s: Seconds between two questions.
        hang_s: Seconds after which an engine that ends no step though requests are there has hung.
        clock: The time in seconds.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[dict[str, Any]]],
        *,
        report_s: float,
        hang_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._report_s, self._hang_s, self._clock = ask, report_s, hang_s, clock
        self._report: dict[str, Any] | None = None
        self._reported_s = self._asked_s = -math.inf
        """When the last report was asked for that came, and when any was."""
        self.failed = 0
        """Requests in a row that have failed here."""
        self._unanswered_s: float | None = None
        """Since when a question has no answer."""
        self._looking: asyncio.Task[None] | None = None
        self._dead = ""

    async def follow(self) -> None:
        """Ask for ever, as far as nobody else does."""
        while True:
            if self._clock() - self._asked_s >= 2 * self._report_s:
                await self.look()
            await asyncio.sleep(self._report_s)

    async def look(self) -> None:
        """Ask, or wait for the answer to a question that was asked already."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())
        await asyncio.shield(self._looking)

    async def _look(self) -> None:
        asked_s = self._asked_s = self._clock()
        if self._unanswered_s is None:
            self._unanswered_s = asked_s
        try:
            self._report, self._reported_s = await self._ask(), asked_s
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine can't be asked
            if isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError):
                return  # it may be in a long step; how long is too long is said elsewhere
            self._dead = f"the engine does not answer: {error or type(error).__name__}"
        else:
            self._dead = ""
        self._unanswered_s = None

    def stats(self) -> dict[str, Any]:
        """Return what the router is told; an engine in a long step has its last report, which grows old."""
        if why := self.why_ill():
            return {ILL: why}
        if self._report is None:
            return {}
        return {REPORT: self._report, AGE: round(self._clock() - self._reported_s, 3), FAILED: self.failed}

    def ended(self, *, failed: bool) -> None:
        """Note that a request ended; ``failed``: for a reason that is this replica's."""
        self.failed = self.failed + 1 if failed else 0

    def why_ill(self) -> str:
        """Return why the engine can't serve; empty: it can."""
        if self._dead:
            return self._dead
        # An engine answers between steps: one that hangs in a step does not answer at all.
        unanswered_s = 0.0 if self._unanswered_s is None else self._clock() - self._unanswered_s
        age_s = max(unanswered_s, float((self._report or {}).get("step_age_s", 0.0)))
        return f"no step ended for {age_s:.0f} s though requests are there" if age_s > self._hang_s else ""
