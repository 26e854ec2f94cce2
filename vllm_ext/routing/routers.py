"""To which replica a request goes. Pure: the same policies route in Ray Serve and in the simulator.

Output lengths are not asked for: in a study a router gained nothing by true ones. What counts is whose KV is where, in
host memory too, what was sent since the last report, and how much longer everybody waits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_ext.routing.fleet import Ask, Fleet, Replica
from vllm_ext.scheduling.load_report.report import LoadReport, Prices

_ALIKE = 1.01
"""Times the least cost up to which replicas cost the same."""


class Router(Protocol):
    """Chooses."""

    def choose(self, ask: Ask, fleet: Fleet, now: float) -> str:
        """Return the name of a replica; the fleet is told by the caller that it was sent there.

        Raises:
            LookupError: there is none.
        """
        ...


def _least(replicas: Sequence[Replica]) -> Replica:
    """Return the one with fewest requests; of several, who has waited longest for one."""
    return min(replicas, key=lambda replica: (replica.requests, replica.sent_s, replica.name))


@dataclass
class RoundRobin:
    """One after the other."""

    _last: str = ""

    def choose(self, ask: Ask, fleet: Fleet, now: float) -> str:  # noqa: ARG002 - whatever is asked
        """Return the next one by name."""
        names = [replica.name for replica in fleet.rotation(now)]
        self._last = next((name for name in names if name > self._last), names[0])
        return self._last


@dataclass(frozen=True)
class Least:
    """Where fewest requests are."""

    def choose(self, ask: Ask, fleet: Fleet, now: float) -> str:  # noqa: ARG002 - whatever is asked
        """Return the least loaded."""
        return _least(fleet.rotation(now)).name


@dataclass(frozen=True)
class Hashed:
    """A conversation always to the same one, whatever its load; others where fewest requests are.

    By the highest random weight (rendezvous), so that a replica that leaves moves its own conversations only.
    """

    def choose(self, ask: Ask, fleet: Fleet, now: float) -> str:
        """Return the one of highest weight."""
        replicas = fleet.rotation(now)
        if ask.session is None:
            return _least(replicas).name
        text = ask.session
        return max(replicas, key=lambda one: hashlib.blake2b(f"{text} {one.name}".encode()).digest()).name


@dataclass(frozen=True, kw_only=True)
class Home:
    """Where the conversation was last, unless that has so many more requests than the least loaded."""

    most_above: int = 8

    def choose(self, ask: Ask, fleet: Fleet, now: float) -> str:
        """Return the home, or the least loaded."""
        replicas = fleet.rotation(now)
        least, home = _least(replicas), fleet.home(ask, replicas)
        return home.name if home is not None and home.requests - least.requests <= self.most_above else least.name


@dataclass(frozen=True, kw_only=True)
class Marginal:
    """Where the request costs least: its own latency, and how much longer all others wait for it.

        cost = weight * own + requests * (uncached * prefill_token_s + output * (decode_s + prompt * context_token_s))
               + again * left_behind * prefill_token_s * (weight + requests)
        own  = wait for what is queued, and for memory and a seat + uncached prefill + load from host memory
               + output * (a step)

    ``output`` is the mean of what all replicas served lately: a replica whose requests were short is no quicker.
    ``left_behind`` are tokens of a conversation whose KV its home has and this replica has not: to move it takes memory
    from others, too, and it may come back. It also stays where that costs little more. New conversations go round among
    those that cost the same.
    """

    weight: float = 8.0
    """Of its own latency: the less it counts the lower is the mean of all, and the longer single requests wait. Chosen
    from 1.5 to 20 on the loads of benchmarks/cluster, with a seed that they do not use.
    """
    stay: float = 0.05
    """Share of the cost that staying may cost more."""
    again: float = 1.0
    """Times that a history counts once more where a conversation would leave its KV behind. Without it agents move
    often for small gains; a greater `stay` keeps short histories, too, behind queues that cost them seconds."""

    def __post_init__(self) -> None:
        for name in ("weight", "stay", "again"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be at least 0")

    def choose(self, ask: Ask, fleet: Fleet, now: float) -> str:
        """Return the cheapest, or the home; without any report the home, or the least loaded."""
        replicas = fleet.rotation(now)
        oldest_s = now - fleet.stale_s  # of a report; all are here if all are out
        told = [(one, one.report) for one in replicas if one.report is not None and one.heard_s >= oldest_s]
        output = sum(report.output_tokens for _, report in told) / max(1, len(told))
        prices = fleet.prices(now)
        home = fleet.home(ask, replicas)
        kept = 0 if home is None else max(home.held(ask.session))
        costs = {one.name: self.cost(ask, one, report, output, prices[one.name], kept) for one, report in told}
        if not costs:
            fleet.blind += 1
            return Home().choose(ask, fleet, now)
        least = min(costs.values())
        if home is not None and costs.get(home.name, float("inf")) <= (1 + self.stay) * least:
            return home.name
        # Who has waited longest holds less KV of conversations that rest, which no report counts as a load.
        return min((one.sent_s, one.name) for one, _ in told if costs[one.name] <= _ALIKE * least)[1]

    def cost(
        self, ask: Ask, replica: Replica, report: LoadReport, output: float, prices: Prices | None = None, kept: int = 0
    ) -> float:
        """Return the cost of a request on a replica, in seconds.

        It is asked of every replica for every request: builtins that a comparison can stand for take a third of it.

        Args:
            ask: The request.
            replica: Where it may go.
            report: Its last one.
            output: Tokens that the request will generate.
            prices: Of the replica; None: those that it reports.
            kept: Tokens of its conversation whose KV its home has.
        """
        prices, prompt = prices or report.prices, ask.prompt_tokens
        prefill_token_s, context_token_s = prices.prefill_token_s, prices.context_token_s
        device, host = replica.held(ask.session)
        cached = host if host > device else device
        if cached >= prompt:
            cached = prompt - 1
        loaded = cached - device if cached > device else 0
        uncached = prompt - cached
        left_behind = (kept if kept < prompt else prompt - 1) - cached
        if left_behind < 0:
            left_behind = 0
        requests, seats = replica.requests, report.seats
        context = report.context_tokens + replica.sent_context_tokens
        running = requests if requests < seats else seats
        step_s = prices.base_s + prices.decode_s * running + context_token_s * context
        half_s = output / 2 * step_s  # what an average request has left
        wait_s = (report.prefill_tokens + replica.sent_prefill_tokens) * prefill_token_s
        over = context + prompt + output - report.pool_tokens
        if over > 0 and context:
            wait_s += min(1.0, over / context) * half_s
        if requests >= seats:
            wait_s += half_s / 2
        fetch_s = uncached * prefill_token_s
        if loaded:  # what is in host memory need not be loaded where computing it is quicker
            fetch_s += loaded * min(prices.host_token_s, prefill_token_s)
        grown_s = prices.decode_s + context_token_s * prompt
        own_s = wait_s + fetch_s + output * (step_s + grown_s)
        moved_s = self.again * left_behind * prefill_token_s * (self.weight + requests) if left_behind else 0.0
        return self.weight * own_s + requests * (uncached * prefill_token_s + output * grown_s) + moved_s


ROUTERS: Mapping[str, Callable[[], Router]] = {
    "round-robin": RoundRobin, "least": Least, "hash": Hashed, "home": Home, "marginal": Marginal,
}  # fmt: skip
"""By the names that flags give them."""


def make_router(name: str) -> Router:
    """Return a policy by its name.

    Raises:
        ValueError: there is none of this name; the message lists those there are.
    """
    if name not in ROUTERS:
        raise ValueError(f"router={name!r}: must be one of {', '.join(ROUTERS)}")
    return ROUTERS[name]()
