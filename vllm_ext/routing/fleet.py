"""What a router knows of the replicas: their last reports, what it has sent since, whose home is where, and who is out.

Pure: the time is an argument, and nothing is asked for. A report is as old as the way it came; what was sent meanwhile
is not in it and counts beside it, or everybody is sent to the replica that was idle a second ago.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vllm_ext.scheduling.load_report.report import Held, LoadReport, Prices

_NOTHING = Held(0, 0)
_LONGEST_OUT_S = 60.0
_KNOWN_STEPS = 1000
"""Of an engine, from which its own prices and those of all engines count alike."""
_SURE_STEPS = 100 * _KNOWN_STEPS
_TERMS = ("base_s", "prefill_token_s", "decode_s", "context_token_s", "host_token_s")
_EXPECTED_S = 60.0
_PRICED_S = 0.25
"""For which prices stand: to blend those of 64 replicas takes longer than to choose among them."""
_MOST_APART = 1e3
"""Times that a price may differ from that of all: a fit can price a term at 0."""


class Ask(NamedTuple):
    """A request, as far as a router knows it."""

    prompt_tokens: int
    """Or an estimate."""
    session: str | None = None
    """Of its conversation, as `report.session_key` makes it; None: it has none."""


class Sent(NamedTuple):
    """A request that no report has yet."""

    at_s: float
    prefill_tokens: int
    prompt_tokens: int


@dataclass(eq=False)
class Replica:
    """One of them, as it is known."""

    name: str
    report: LoadReport | None = None
    heard_s: float = 0.0
    """When that came."""
    sent: deque[Sent] = field(default_factory=deque)
    """What the report can't have yet."""
    in_flight: int = 0
    """Requests of this router that have not ended."""
    failures: int = 0
    """In a row."""
    told_failures: int = 0
    """The same, as the replica told it last."""
    failed_s: float = 0.0
    """When the last one was."""
    times_out: int = 0
    """In a row: each time for twice as long."""
    sent_s: float = float("-inf")
    """When something was sent last."""
    sent_prefill_tokens: int = 0
    sent_context_tokens: int = 0
    expected: OrderedDict[str, tuple[float, int]] = field(default_factory=OrderedDict)
    """Conversation that was sent here and that no report has had since -> when, and tokens of its prompt."""

    @property
    def requests(self) -> int:
        """Those who run, wait, or are under way; without reports, those that this router sent there lately."""
        if self.report is None:  # nobody tells what ended, so what was sent lately has to do
            return len(self.sent)
        return self.report.running + self.report.waiting + len(self.sent)

    def forget(self, before_s: float) -> None:
        """Let go of what was sent before a moment: a report has it, or it is long gone."""
        while self.sent and self.sent[0].at_s < before_s:
            old = self.sent.popleft()
            self.sent_prefill_tokens -= old.prefill_tokens
            self.sent_context_tokens -= old.prompt_tokens

    def held(self, session: str | None) -> Held:
        """Return what it has of a conversation's KV, by its report or since that was sent here."""
        if session is None:
            return _NOTHING
        told = _NOTHING if self.report is None else self.report.resident.get(session, _NOTHING)
        _, expected = self.expected.get(session, (0.0, 0))
        return told if expected <= told.device else Held(expected, told.host)

    def expect(self, session: str, tokens: int, now: float) -> None:
        """Take a conversation's KV for held until a report tells, or for a minute: of one without a name none does."""
        self.expected[session] = (now, tokens)
        self.expected.move_to_end(session)
        while self.expected and next(iter(self.expected.values()))[0] < now - _EXPECTED_S:
            self.expected.popitem(last=False)

    def uncached_tokens(self, ask: Ask) -> int:
        """Return the tokens of a prompt that it would compute; at least the last."""
        return max(1, ask.prompt_tokens - max(self.held(ask.session)))


@dataclass(kw_only=True)
class Fleet:
    """All replicas.

    Args:
        stale_s: A replica whose report is older is out of rotation.
        most_failures: So many in a row, and it is out until it reports again.
        lag_s: For so long a report may be on its way: what was sent within that time before it may not be in it.
        most_homes: Conversations that are remembered.
    """

    stale_s: float = 5.0
    most_failures: int = 3
    lag_s: float = 0.25
    most_homes: int = 100_000
    replicas: dict[str, Replica] = field(default_factory=dict)
    """By name, in order."""
    homes: OrderedDict[str, str] = field(default_factory=OrderedDict)
    """Conversation -> replica that had it last, the oldest first."""
    blind: int = 0
    """Decisions without any report."""
    _prices: dict[str, Prices] | None = None
    """By replica; None: to be made at once."""
    _priced_s: float = 0.0
    _learned: dict[str, int] = field(default_factory=dict)
    """Conversation -> tokens that its home had when it was learned from a report, until something is sent."""

    def __post_init__(self) -> None:
        for name in ("stale_s", "most_failures"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be greater than 0")
        for name in ("lag_s", "most_homes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be at least 0")

    def consist_of(self, names: Iterable[str]) -> None:
        """Take in replicas that are new, and forget those that are gone."""
        known = sorted(set(names))
        if known != [*self.replicas]:
            self.replicas = {name: self.replicas.get(name) or Replica(name) for name in known}
            self._prices = None

    def heard(self, name: str, report: LoadReport, now: float, age_s: float = 0.0) -> bool:
        """Take in a report of so many seconds ago; False if it is of nobody known, or no newer than the last one."""
        replica = self.replicas.get(name)
        if replica is None:
            return False
        last = replica.report
        if last is not None and last.started == report.started and report.number <= last.number:
            return False
        replica.report, replica.heard_s = report, now
        if last is None:
            self._prices = None
        known_s = now - age_s - self.lag_s
        replica.forget(known_s)
        for session in report.resident.keys() & replica.expected.keys():
            if replica.expected[session][0] < known_s:
                del replica.expected[session]
        if now - replica.failed_s > 2 * _LONGEST_OUT_S:  # nobody may tell that requests end well
            replica.failures = replica.times_out = 0
        if last is None or last.started != report.started:  # of a router, or a replica, that was started anew
            for session, held in report.resident.items():
                self._learn(session, name, max(held))
        return True

    def sent(self, name: str, ask: Ask, now: float) -> None:
        """Note where a request went."""
        replica = self.replicas[name]
        tokens = replica.uncached_tokens(ask)
        replica.sent.append(Sent(now, tokens, ask.prompt_tokens))
        replica.sent_prefill_tokens += tokens
        replica.sent_context_tokens += ask.prompt_tokens
        replica.in_flight, replica.sent_s = replica.in_flight + 1, now
        if replica.report is None or self.is_stale(replica, now):
            replica.forget(now - self.stale_s)
        if ask.session is not None:
            replica.expect(ask.session, ask.prompt_tokens, now)
            self._settle(ask.session, name)

    def ended(self, name: str) -> None:
        """Note that a request ended."""
        if (replica := self.replicas.get(name)) is not None:
            replica.in_flight = max(0, replica.in_flight - 1)

    def failed(self, name: str, in_a_row: int, now: float) -> None:
        """Note how many requests in a row have failed at a replica, for reasons of its own; 0: the last one did not."""
        replica = self.replicas.get(name)
        if replica is None or in_a_row == replica.told_failures:
            return
        replica.told_failures = in_a_row
        if not in_a_row:
            replica.failures = replica.times_out = 0
            return
        was_out = self.is_out(replica, now)
        replica.failures, replica.failed_s = max(replica.failures, in_a_row), now
        if replica.failures >= self.most_failures and not was_out:
            replica.times_out += 1

    def withdraw(self, name: str, now: float) -> None:
        """Take a replica out that is known not to serve; it comes back as after failures."""
        replica = self.replicas.get(name)
        if replica is None:
            return
        if not self.is_out(replica, now):
            replica.times_out += 1
        replica.failures, replica.failed_s = max(replica.failures, self.most_failures), now

    def is_out(self, replica: Replica, now: float) -> bool:
        """Whether nothing should be sent there.

        That is so while its reports are stale; after failures in a row until it reports again, and for a time that
        doubles each time: a dead engine answers soonest, and would draw all requests to it.
        """
        if self.is_stale(replica, now):
            return True
        if replica.failures < self.most_failures:
            return False
        rests_s = min(_LONGEST_OUT_S, 2.0 ** min(replica.times_out - 1, 10))
        rested = now - replica.failed_s >= rests_s
        return not (rested and (replica.report is None or replica.heard_s > replica.failed_s))

    def is_stale(self, replica: Replica, now: float) -> bool:
        """Whether a replica has reported, and not lately."""
        return replica.report is not None and now - replica.heard_s > self.stale_s

    def rotation(self, now: float) -> list[Replica]:
        """Return those to choose from, by name: who has reported, if anybody has; all of them, if all are out.

        Raises:
            LookupError: there is none.
        """
        if not self.replicas:
            raise LookupError("no replica is known")
        # Asked twice for each request, of every replica: most are told fit without a call.
        oldest_s, most = now - self.stale_s, self.most_failures
        fit = [
            one
            for one in self.replicas.values()
            if (one.failures < most and (one.report is None or one.heard_s >= oldest_s)) or not self.is_out(one, now)
        ]
        told = [replica for replica in fit if replica.report is not None]
        return told or fit or [*self.replicas.values()]

    def prices(self, now: float) -> dict[str, Prices]:
        """Return what things cost at each replica that has reported, as of a quarter of a second ago at most.

        Of an engine that has served little a few odd steps may say that it is slow; it would get nothing more, and
        learn no better. So what is known of all counts besides, in geometric means, and less with every step.
        """
        if self._prices is None or now - self._priced_s >= _PRICED_S:
            told = {one.name: one.report.prices for one in self.replicas.values() if one.report is not None}
            self._prices = dict(zip(told, _blended([*told.values()]), strict=True))
            self._priced_s = now
        return self._prices

    def home(self, ask: Ask, among: Container[Replica]) -> Replica | None:
        """Return where a conversation was last, if that is among these."""
        name = None if ask.session is None else self.homes.get(ask.session)
        replica = None if name is None else self.replicas.get(name)
        return replica if replica is not None and replica in among else None

    def _learn(self, session: str, name: str, tokens: int) -> None:
        """Note who has KV of a conversation of which nothing is known, or less elsewhere."""
        known = self.homes.get(session)
        most = self._learned.get(session, 0 if known is None else None)
        if most is not None and tokens and (-tokens, name) < (-most, known or "~"):
            self._settle(session, name)
            self._learned[session] = tokens

    def _settle(self, session: str, name: str) -> None:
        self._learned.pop(session, None)
        self.homes[session] = name
        self.homes.move_to_end(session)
        while len(self.homes) > self.most_homes:
            self._learned.pop(self.homes.popitem(last=False)[0], None)


def _blended(told: list[Prices]) -> list[Prices]:
    """Return each replica's prices, moved towards those of all as far as its own are not known."""
    if all(one.steps >= _SURE_STEPS for one in told):
        return told
    own = np.array([[getattr(one, name) for name in _TERMS] for one in told])
    steps = np.array([one.steps for one in told], dtype=float)
    weights = (steps + 1) / (steps + 1).sum()
    # An arithmetic mean first, for bounds that a term of 0 does not move.
    mean = weights @ own
    logs = np.log(np.clip(own, mean / _MOST_APART, mean * _MOST_APART).clip(1e-300))
    share = (steps / (steps + _KNOWN_STEPS))[:, None]
    found = np.exp(share * logs + (1 - share) * (weights @ logs))
    found[:, mean == 0] = 0.0
    return [
        Prices(**dict(zip(_TERMS, row.tolist(), strict=True)), steps=one.steps)
        for one, row in zip(told, found, strict=True)
    ]
