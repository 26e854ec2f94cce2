"""A workload whose clients follow plans: who sends the next request, when, and with which history."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from vllm_ext.simulation.requests import NO_SLO, SimRequest, Slo
from vllm_ext.simulation.workloads import announcing, token_ids
from vllm_ext.simulation.workloads.expectations import slo
from vllm_ext.simulation.workloads.plans import Plan, Planner, Turn
from vllm_ext.simulation.workloads.sessions import Source
from vllm_ext.simulation.workloads.spec import WorkloadSpec

NO_BOUND = 1 << 30
"""``max_tokens`` where the client sets none and the context is not known: the server's context is the bound."""
_PLAN, _TURN = "plan", "turn"


class GeneratedWorkload:
    """Requests of a source, at the times of an arrival process. Made by `vllm_ext.simulation.workloads.build.build`.

    Open loop: `after` depends on its arguments only. Closed loop: whoever ends first takes the next session, so that
    one run at a time can use a workload; `start` begins anew.

    Args:
        spec: The validated description.
        source: Of sessions.
        arrival_times: Begins the arrival process anew; increasing times in seconds. None: a closed loop.
        limit: How many sessions begin; None: no limit.
        think_s: Mean think time, in seconds.
    """

    def __init__(
        self,
        spec: WorkloadSpec,
        source: Source,
        arrival_times: Callable[[], Iterator[float]] | None,
        limit: int | None,
        think_s: float | None,
    ) -> None:
        self._spec = spec
        self._source = source
        self._arrival_times = arrival_times
        self._limit = limit
        self._think_s = think_s
        self._sigma = announcing.sigma_of(spec.announce_error)
        self._system_prompt = token_ids.system_prompt(spec.system_prompt_tokens)
        self._expected: int | None = None
        self._queue: Iterator[Plan] = iter(())

    @property
    def name(self) -> str:
        """File or preset, for reports."""
        return self._source.name

    @property
    def rows(self) -> int:
        """Sessions in the underlying files, after filters; 0 if there are presets only."""
        return self._source.rows

    @property
    def sha256(self) -> str:
        """Checksum of the file, or of what describes the preset and its seed."""
        return self._source.sha256

    @property
    def expected_requests(self) -> int | None:
        """How many requests a run will see; None if that depends on the run: turns may be left out, clients wait."""
        if self._limit == 0:
            return 0
        if self._source.conversations or (self._arrival_times is None and self._spec.duration_s is not None):
            return None
        if self._arrival_times is None:
            return self._limit
        if self._expected is None:
            self._expected = sum(1 for _ in self._times(self._arrival_times))
        return self._expected

    def start(self) -> Iterator[SimRequest]:
        """Yield the requests whose arrival does not depend on the run, by arrival time, lazily."""
        plans = self._plans()
        if self._arrival_times is not None:
            times = self._times(self._arrival_times)
            return (self._opening(plan, arrival_s) for arrival_s, plan in zip(times, plans, strict=False))
        self._queue = plans
        return (self._opening(plan, 0.0) for plan in itertools.islice(plans, self._spec.clients))

    def after(self, request: SimRequest, finished_s: float, output_ids: Sequence[int]) -> Iterable[SimRequest]:
        """Return the conversation's next turn; else, in a closed loop, the client's next session.

        A conversation ends early where its client has disconnected, where a turn was refused or gave no token, and,
        with ``over_context="drop"``, where the next turn would exceed the context.
        """
        plan: Plan = request.meta[_PLAN]
        following = self._next_turn(request, plan, finished_s, output_ids)
        if following is None and self._arrival_times is None:
            following = self._next_session(finished_s)
        return () if following is None else (following,)

    def _plans(self) -> Iterator[Plan]:
        planner = Planner(self._spec, self._think_s)
        sessions = itertools.islice(self._source.sessions(), self._limit)
        return itertools.starmap(planner.plan, enumerate(sessions))

    def _times(self, arrival_times: Callable[[], Iterator[float]]) -> Iterator[float]:
        times = itertools.islice(arrival_times(), self._limit)
        if (end_s := self._spec.duration_s) is None:
            return times
        return itertools.takewhile(lambda time_s: time_s < end_s, times)

    def _too_late(self, arrival_s: float) -> bool:
        return self._spec.duration_s is not None and arrival_s >= self._spec.duration_s

    def _next_session(self, finished_s: float) -> SimRequest | None:
        if self._too_late(finished_s):
            return None
        plan = next(self._queue, None)
        if plan is None:
            return None
        arrival_s = finished_s + plan.turns[0].think_s
        return None if self._too_late(arrival_s) else self._opening(plan, arrival_s)

    def _opening(self, plan: Plan, arrival_s: float) -> SimRequest:
        first = plan.turns[0].exchange
        ids: list[int] | None = None
        if plan.session.hash_ids is not None:
            ids = token_ids.of_blocks(plan.session.hash_ids, first.prompt_tokens, plan.session.hash_block_tokens)
        elif self._system_prompt or len(plan.turns) > 1:
            ids = token_ids.opening(plan.number, first.prompt_tokens)
        if ids is not None and self._system_prompt:
            ids = self._system_prompt + ids
        return self._request(plan, 0, arrival_s, len(self._system_prompt) + first.prompt_tokens, ids)

    def _next_turn(
        self, request: SimRequest, plan: Plan, finished_s: float, output_ids: Sequence[int]
    ) -> SimRequest | None:
        turn = request.meta[_TURN] + 1
        if turn == len(plan.turns) or not output_ids or _gave_up(request, finished_s) or request.token_ids is None:
            return None
        arrival_s = finished_s + plan.turns[turn].think_s
        if self._too_late(arrival_s):
            return None
        wanted = plan.turns[turn].exchange
        history = [*request.token_ids, *output_ids]
        excess = len(history) + wanted.prompt_tokens + self._served(wanted.output_tokens) - self._context()
        if excess > 0:
            kept = len(self._system_prompt)
            if self._spec.over_context == "drop" or excess > len(history) - kept:
                return None
            del history[kept : kept + excess]
        ids = history + token_ids.added(plan.number, turn, wanted.prompt_tokens)
        return self._request(plan, turn, arrival_s, len(ids), ids)

    def _request(
        self, plan: Plan, index: int, arrival_s: float, prompt_tokens: int, ids: list[int] | None
    ) -> SimRequest:
        turn: Turn = plan.turns[index]
        several = len(plan.turns) > 1
        tier = plan.tier
        max_tokens = self._max_tokens(prompt_tokens, turn.exchange.output_tokens)
        expected = NO_SLO if tier is None else slo(tier, prompt_tokens, turn.factors)
        return SimRequest(
            req_id=f"r{plan.number}.{index}" if several else f"r{plan.number}",
            arrival_s=arrival_s,
            prompt_tokens=prompt_tokens,
            output_tokens=turn.exchange.output_tokens,
            max_tokens=max_tokens,
            token_ids=ids,
            extra_args=self._extra_args(min(turn.exchange.output_tokens, max_tokens), turn.error, expected),
            priority=0 if tier is None else tier.priority,
            session_id=f"s{plan.number}" if several else None,
            slo=expected,
            tier="" if tier is None else tier.name,
            abort_after_s=turn.abort_after_s,
            patience_s=self._spec.patience_s,
            prompt=turn.exchange.text,
            meta={_PLAN: plan, _TURN: index},
        )

    def _extra_args(self, true_tokens: int, error: float, expected: Slo) -> dict[str, Any] | None:
        said: dict[str, Any] = {}
        if self._spec.announce == "hidden":
            said.update(announcing.hidden(true_tokens))
        elif self._spec.announce == "hint":
            said.update(announcing.hint(true_tokens, self._sigma, error))
        if self._spec.announce_slo:
            said.update(announcing.objectives(expected))
        return said or None

    def _max_tokens(self, prompt_tokens: int, output_tokens: int) -> int:
        room = max(1, self._context() - prompt_tokens)
        policy = self._spec.max_tokens
        if policy == "cap":
            return room
        return min(room, output_tokens if policy == "exact" else policy)

    def _served(self, output_tokens: int) -> int:
        """Most tokens that the client's constant bound lets through."""
        return min(output_tokens, self._spec.max_tokens) if isinstance(self._spec.max_tokens, int) else output_tokens

    def _context(self) -> int:
        return self._spec.max_model_len or NO_BOUND


def _gave_up(request: SimRequest, finished_s: float) -> bool:
    return request.abort_after_s is not None and finished_s >= request.arrival_s + request.abort_after_s
