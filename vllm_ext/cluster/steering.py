"""Between Ray Serve and the policies: what it knows of a request and of replicas, made into theirs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ray.util.metrics import Counter

from vllm_ext.cluster.health import AGE, FAILED, ILL, REPORT
from vllm_ext.hints import MAX_CONVERSATION_ID_CHARS
from vllm_ext.routing.fleet import Ask, Fleet
from vllm_ext.routing.routers import make_router
from vllm_ext.scheduling.load_report.report import LoadReport, session_key

logger = logging.getLogger("ray.serve")

_CHARS_PER_TOKEN = 4
_UNKNOWN_TOKENS = 512
"""Of a prompt that was not forwarded."""
_HEAD_CHARS = 1024
"""Of a prompt that names no conversation: a hash of them stands for it, as its next turn begins with the same. What a
chat's system prompt says is none of it: strangers share that."""
_MOST_PARTS = 4096
"""Messages, texts and what else of a prompt is looked at: who routes serves nobody meanwhile."""
_SHARED = ("system", "developer")
"""Roles of messages that are an application's, not a conversation's."""


class Steering:
    """A fleet and a policy. One in each process that routes, and of one event loop.

    Args:
        policy: Of `routing.ROUTERS`.
        clock: The time in seconds.
        stale_s: See `Fleet`.

    Raises:
        ValueError: there is no such policy, or a number can't be.
    """

    def __init__(self, policy: str, *, clock: Callable[[], float] = time.monotonic, stale_s: float = 5.0) -> None:
        self._policy, self._clock = make_router(policy), clock
        self.fleet = Fleet(stale_s=stale_s)
        self._ill: dict[str, str] = {}
        self._unread = False
        self._blind = Counter(
            "vllm_ext_router_blind_decisions", description="Requests that were routed without any replica's report."
        )
        self._left = Counter(
            "vllm_ext_router_replicas_out", description="Times a replica said that it can't serve, or died."
        )

    def update(self, stats: Mapping[str, Mapping[str, Any]]) -> None:
        """Take in who is there, and what they report.

        Args:
            stats: Routing statistics by replica.
        """
        now = self._clock()
        self.fleet.consist_of(stats)
        for name, told in stats.items():
            if why := told.get(ILL):
                self._withdraw(name, str(why), now)
            elif (raw := told.get(REPORT)) is not None and not self._is_known(name, raw):
                self._ill.pop(name, None)
                if (report := self._read(raw)) is not None:
                    self.fleet.heard(name, report, now, float(told.get(AGE, 0.0)))
                self.fleet.failed(name, int(told.get(FAILED, 0)), now)

    def ranked(self, names: Collection[str], session: str, request: Any) -> list[str]:
        """Return replicas in the order in which to ask them, and take note of where the request goes.

        Args:
            names: Who may be asked.
            session: Of the header; empty: there was none.
            request: The body as an object; None: it was not forwarded.
        """
        if not self.fleet.replicas:
            return [*names]
        now = self._clock()
        ask, blind = ask_of(session, request), self.fleet.blind
        chosen = self._policy.choose(ask, self.fleet, now)
        if self.fleet.blind > blind:
            self._blind.inc()
        others = sorted((one for one in self.fleet.rotation(now) if one.name != chosen), key=lambda one: one.requests)
        allowed = frozenset(names)
        order = [name for name in (chosen, *(one.name for one in others)) if name in allowed]
        if not order:  # Ray has just lost them all, or has others that were not told of
            return [*names]
        self.fleet.sent(order[0], ask, now)
        return order

    def died(self, name: str) -> None:
        """Send a replica nothing until it reports again."""
        self._withdraw(name, "its process has died", self._clock())

    def completed(self, name: str) -> None:
        """Note that a request ended, well or not: how many failed is told by the replica itself."""
        self.fleet.ended(name)

    def _withdraw(self, name: str, why: str, now: float) -> None:
        self.fleet.withdraw(name, now)
        if self._ill.get(name) != why:
            self._ill[name] = why
            self._left.inc()
            logger.warning("vllm-ext: nothing is sent to replica %s: %s", name, why)

    def _is_known(self, name: str, raw: Mapping[str, Any]) -> bool:
        """Whether a report was taken in: whoever reports, Ray tells of all, and to read one takes a millisecond."""
        last = self.fleet.replicas[name].report
        told = (raw.get("started", ""), raw.get("number"))
        return last is not None and told == (last.started, last.number)

    def _read(self, raw: Mapping[str, Any]) -> LoadReport | None:
        try:
            return LoadReport.parse(raw)
        except ValueError as error:
            if not self._unread:
                self._unread = True
                logger.warning("vllm-ext: a load report can't be read (%s); is the replica of another version?", error)
            return None


def ask_of(session: str, request: Any) -> Ask:
    """Return a request as policies see it; what the body says of its conversation wins, as in the engine."""
    arguments = getattr(request, "vllm_xargs", None)
    named = arguments.get("conversation_id") if isinstance(arguments, Mapping) else None
    for name in (named, getattr(request, "session_id", None)):
        if isinstance(name, str) and 0 < len(name) <= MAX_CONVERSATION_ID_CHARS:
            session = name
            break
    tokens, head = _UNKNOWN_TOKENS, ""
    if request is not None:
        tokens, head = _measured(request)
    if 0 < len(session) <= MAX_CONVERSATION_ID_CHARS:
        return Ask(tokens, session_key(session))
    if len(head) < _HEAD_CHARS:  # shorter ones would make strangers one conversation
        return Ask(tokens)
    return Ask(tokens, session_key(head))


def _measured(request: Any) -> tuple[int, str]:
    """Return about how many tokens a prompt has, and the first characters of what is its own."""
    prompt = getattr(request, "prompt", None)
    if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt and isinstance(prompt[0], int):
        return len(prompt), " ".join(map(str, prompt[:_HEAD_CHARS]))
    if isinstance(prompt, list) and prompt and all(isinstance(one, list) for one in prompt):
        return max(1, sum(len(one) for one in prompt)), ""
    size, head, left = 0, "", _MOST_PARTS
    stack = [(prompt if prompt is not None else getattr(request, "messages", None), False)]
    while stack and left:
        left -= 1
        part, shared = stack.pop()
        if isinstance(part, str):
            size += len(part)
            if not shared and len(head) < _HEAD_CHARS:
                head += part[: _HEAD_CHARS - len(head)]
        elif isinstance(part, Mapping):
            shared = shared or part.get("role") in _SHARED
            stack += [(part.get("text"), shared), (part.get("content"), shared)]
        elif isinstance(part, Sequence):
            stack += [(one, shared) for one in reversed(part[:left])]
    return max(1, size // _CHARS_PER_TOKEN), head
