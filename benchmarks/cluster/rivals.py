"""Routers of others, stated again as policies, to be compared with. A part of the benchmarks of clusters.

What each goes by was read off its source or its documentation; none of its code is here. Where one looks for a prompt's
prefix in what it sent before, a conversation's tokens stand for it: that is what the prefix would be.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_ext.routing.fleet import Ask, Fleet, Replica
from vllm_ext.routing.routers import Router

LLM_D = "llm-d's"


def _by_chance(replicas: Sequence[Replica], rng: random.Random) -> Replica:
    """Return the one with fewer requests of two drawn."""
    return min(rng.sample(list(replicas), min(2, len(replicas))), key=lambda one: one.in_flight)


@dataclass
class _Sent:
    """Tokens of conversations that were sent to replicas, as a router remembers them."""

    tokens: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    """Replica -> conversation -> tokens."""

    def share(self, replica: Replica, ask: Ask) -> float:
        """Return the share of a prompt that a replica has seen."""
        return min(1.0, self.tokens[replica.name].get(ask.session or "", 0) / ask.prompt_tokens)

    def total(self, replica: Replica) -> int:
        """Return the tokens that it has seen, of all conversations."""
        return sum(self.tokens[replica.name].values())

    def note(self, name: str, ask: Ask) -> str:
        """Note where a request went, and return that."""
        if ask.session is not None:
            self.tokens[name][ask.session] = ask.prompt_tokens
        return name


@dataclass
class PowerOfTwo:
    """Of two drawn by chance the one with fewer requests: the default of Ray Serve."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def choose(self, ask: Ask, fleet: Fleet, now: float) -> str:
        """Draw."""
        return _by_chance(fleet.rotation(now), self.rng).name


@dataclass
class _Affinity(ABC):
    """In an even fleet who has seen enough of the prompt, else who has seen least of all."""

    most_apart: float
    """Requests that the fullest replica may have more than the emptiest."""
    least_share: float
    """Of the prompt."""
    _sent: _Sent = field(default_factory=_Sent)

    def choose(self, ask: Ask, fleet: Fleet, now: float) -> str:
        """Choose."""
        replicas = fleet.rotation(now)
        loads = [one.in_flight for one in replicas]
        if self._is_uneven(min(loads), max(loads)):
            chosen = self._where_uneven(replicas)
        else:
            chosen = max(replicas, key=lambda one: self._sent.share(one, ask))
            if self._sent.share(chosen, ask) < self.least_share:
                chosen = min(replicas, key=self._sent.total)
        return self._sent.note(chosen.name, ask)

    def _is_uneven(self, least: int, most: int) -> bool:
        return most - least > self.most_apart

    @abstractmethod
    def _where_uneven(self, replicas: Sequence[Replica]) -> Replica: ...


@dataclass
class RayPrefix(_Affinity):
    """Ray Serve LLM 2.60, PrefixCacheAffinityRouter, as it comes: who has seen a tenth of the prompt or more.

    Else who has seen least of all. With ``imbalanced_threshold``, which is infinite: by chance of two where the fullest
    replica has so many requests more than the emptiest.
    """

    most_apart: float = math.inf
    least_share: float = 0.1
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def _where_uneven(self, replicas: Sequence[Replica]) -> Replica:
        return _by_chance(replicas, self.rng)


@dataclass
class SglangCacheAware(_Affinity):
    """SGLang's gateway, cache_aware.

    Unbalanced is a fleet whose fullest replica has more than 64 requests, and half as many, more than the emptiest:
    then the emptiest. Else who has seen three tenths of the prompt or more, else who has seen least of all.
    """

    most_apart: float = 64
    least_share: float = 0.3
    most_times: float = 1.5

    def _is_uneven(self, least: int, most: int) -> bool:
        return super()._is_uneven(least, most) and most > self.most_times * least

    def _where_uneven(self, replicas: Sequence[Replica]) -> Replica:
        return min(replicas, key=lambda one: one.in_flight)


@dataclass
class LlmD:
    """llm-d's scorers by its default weights: 3 for the prefix, 2 for the queue, 2 for free KV memory."""

    prefix: float = 3.0
    queue: float = 2.0
    memory: float = 2.0
    _sent: _Sent = field(default_factory=_Sent)

    def choose(self, ask: Ask, fleet: Fleet, now: float) -> str:
        """Choose the highest score; of equals who has waited longest for a request."""
        replicas = fleet.rotation(now)
        waiting = [0 if one.report is None else one.report.waiting for one in replicas]
        most, span = max(waiting), max(waiting) - min(waiting)

        def score(one: Replica) -> float:
            report = one.report
            empty = 1.0 if span == 0 or report is None else (most - report.waiting) / span
            free = 1.0 if report is None else max(0.0, 1 - report.context_tokens / report.pool_tokens)
            return self.prefix * self._sent.share(one, ask) + self.queue * empty + self.memory * free

        chosen = max(replicas, key=lambda one: (score(one), -one.sent_s, one.name))
        return self._sent.note(chosen.name, ask)


RIVALS: Mapping[str, Callable[[], Router]] = {
    "power of two": PowerOfTwo, "Ray's prefix": RayPrefix, "Ray's prefix, 10 apart": lambda: RayPrefix(most_apart=10),
    "SGLang's": SglangCacheAware, "SGLang's, 16 apart": lambda: SglangCacheAware(most_apart=16, most_times=1.2),
    LLM_D: LlmD,
}  # fmt: skip
"""By the names of rows: each as it comes, and where an even load counts for less than one replica's few requests here,
with thresholds that are of use at this size."""
