"""Conversations that the routing benchmark serves: drawn by length distributions, or read from public files.

The distributions are fitted to the same files: ShareGPT, customer-service agents of tau2-bench, coding sessions of Weka
(lengths divided as below), and prompts of the arXiv. A part of the benchmarks of clusters.
"""

from __future__ import annotations

import gzip
import hashlib
import heapq
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_ext import datasets
from vllm_ext.prediction.text import estimated_tokens
from vllm_ext.simulation.workloads import arrivals, token_ids
from vllm_ext.simulation.workloads.randomness import Purpose, choices, generator
from vllm_ext.simulation.workloads.requests import SimRequest
from vllm_ext.simulation.workloads.synthetic import FixedLength, Lengths, LengthShape, UniformLengths

_LONGEST_SESSION = 24_000
"""Prompt and answer of a recorded session at which it is cut, in tokens."""
BEFORE_S = 600.0
"""Of a run: conversations that began then may still go on when it begins."""
TOKEN_S = 0.03
"""Guess of what an output token takes, for how far they are."""
_ONE = FixedLength(tokens=1)
_CHUNK = 256
"""Conversations drawn at once: a part of what a seed means."""


class Turn(NamedTuple):
    """What a turn adds to the history."""

    new_tokens: int
    output_tokens: int
    think_s: float = 0.0
    """From the end of the answer before it; not used by the first."""


Conversation = tuple[Turn, ...]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Conversations of one kind, by their distributions: lengths in tokens, times in seconds."""

    first: Lengths
    """Of the first prompt."""
    later: Lengths = _ONE
    """What each later turn adds."""
    output: Lengths
    turns: Lengths = _ONE
    most_turns: int = 1
    think: LengthShape | None = None
    """None: exponential with mean ``think_s``."""
    think_s: float = 30.0
    most_think_s: float = 120.0
    longest: int = 12_288
    """Longest prompt addition and output."""

    def drawn(self, seed: int, number: int) -> Iterator[Conversation]:
        """Yield conversations without end; ``number`` tells kinds of one seed apart."""
        rng = generator(seed, Purpose.LENGTHS, number)
        while True:
            turns = self.turns.draw(rng, _CHUNK, self.most_turns)
            first = self.first.draw(rng, _CHUNK, self.longest)
            later = iter(self.later.draw(rng, sum(turns), self.longest))
            outputs = iter(self.output.draw(rng, sum(turns), self.longest))
            thought = iter(self._thought(rng, sum(turns)))
            for count, opening in zip(turns, first, strict=True):
                new = [opening, *itertools.islice(later, count)][:count]
                yield tuple(
                    Turn(*turn)
                    for turn in zip(
                        new, itertools.islice(outputs, count), itertools.islice(thought, count), strict=True
                    )
                )

    def _thought(self, rng: np.random.Generator, count: int) -> list[float]:
        if self.think is None:
            return [float(one) for one in np.minimum(rng.exponential(self.think_s, count), self.most_think_s)]
        return [float(one) for one in self.think.draw(rng, count, round(self.most_think_s))]


KINDS: Mapping[str, Kind] = {
    "chat": Kind(
        first=LengthShape(median=25, p90=527), later=LengthShape(median=15, p90=83),
        output=LengthShape(median=200, p90=485), turns=LengthShape(median=2.6, p90=7), most_turns=16, longest=1024,
    ),
    "agents": Kind(
        first=UniformLengths(low=2520, high=2600), later=LengthShape(median=86, p90=390),
        output=LengthShape(median=70, p90=280), turns=LengthShape(median=9, p90=17), most_turns=40, longest=4096,
        think_s=5.0,
    ),
    "coding": Kind(
        first=LengthShape(median=2672, p90=14_299), later=LengthShape(median=40, p90=300),
        output=LengthShape(median=111, p90=502), turns=UniformLengths(low=16, high=30), most_turns=30,
        think=LengthShape(median=2, p90=25), most_think_s=30.0, longest=24_000,
    ),
    "document": Kind(first=UniformLengths(low=3657, high=11_802), output=LengthShape(median=208, p90=371)),
}  # fmt: skip


def _answered(path: Path, opening_tokens: int, most_turns: int, think_s: float) -> Iterator[Conversation | None]:
    """Turns of a file in the ShareGPT format; lengths of texts are estimated."""
    for place, row in enumerate(datasets.load(path, "sharegpt").rows):
        thought = np.random.default_rng(place).exponential(think_s, 1 + len(row.later))
        turns = []
        for turn, think in zip((row, *row.later), thought, strict=True):
            new, output = (max(1, round(estimated_tokens(text or ""))) for text in (turn.prompt, turn.output_text))
            turns.append(Turn(new, min(output, 1024), float(min(think, 120.0))))
        turns[0] = turns[0]._replace(new_tokens=turns[0].new_tokens + opening_tokens)
        yield tuple(turns[:most_turns])


def _coding(path: Path) -> Iterator[Conversation | None]:
    """Sessions of Weka's traces without sub-agents: inputs divided by 8, outputs by 2, think times by 4.

    None stands for those of one turn.
    """
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            turns, history = list[Turn](), 0
            for request in json.loads(line)["requests"][:200]:
                if request.get("type") == "subagent" or "in" not in request or len(turns) == 30:
                    continue
                prompt, output = max(1, request["in"] // 8), max(1, request["out"] // 2)
                if prompt + output > _LONGEST_SESSION:
                    break
                new = max(32, prompt - history)
                turns.append(Turn(new, output, min(30.0, float(request.get("think_time") or 0) / 4)))
                history += new + output
            yield tuple(turns) if len(turns) > 1 else None


def _documents(path: Path) -> Iterator[Conversation | None]:
    """Single prompts three times as long as those of the arXiv."""
    for row in datasets.load(path, "lengths").rows:
        yield (Turn(3 * (row.prompt_tokens or 1), row.output_tokens or 1),)


FILES: Mapping[str, tuple[str, Callable[[Path], Iterator[Conversation | None]]]] = {
    "chat": ("multi_turn/sharegpt.jsonl.gz", lambda path: _answered(path, 0, 62, 30.0)),
    # The policy that agents are told is not in the file.
    "agents": ("multi_turn/tau2_agent.jsonl.gz", lambda path: _answered(path, 2500, 40, 5.0)),
    "coding": ("traces/weka_coding_sessions.jsonl.gz", _coding),
    "document": ("traces/arxiv_lengths_llama2.csv.gz", _documents),
}  # fmt: skip
"""Kind -> file below the folder of data, and its reader; None stands for what is left out."""


def is_held_out(name: str, place: int) -> bool:
    """Return whether an entry of a file belongs to the half that decides at the end."""
    return bool(hashlib.blake2b(f"{name} {place}".encode(), digest_size=1).digest()[0] & 1)


def recorded(path: Path, kind: str, *, held_out: bool) -> list[Conversation]:
    """Return the conversations of one half of a file.

    Raises:
        ValueError: (DatasetError) the file can't be read.
    """
    read = enumerate(FILES[kind][1](path))
    return [found for place, found in read if found is not None and is_held_out(path.name, place) == held_out]


def _redrawn(found: Sequence[Conversation], seed: int, number: int) -> Iterator[Conversation]:
    rng = generator(seed, Purpose.ROWS, number)
    while True:
        yield from (found[place] for place in rng.integers(len(found), size=_CHUNK).tolist())


def drawn(
    shares: Mapping[str, float], seed: int, data: Mapping[str, Sequence[Conversation]] | None = None
) -> Iterator[Conversation]:
    """Yield conversations of several kinds without end.

    Args:
        shares: Kind -> its share of the conversations.
        seed: Of everything random.
        data: Kind -> those to draw from, with replacement; None: they are made up.
    """
    streams = [
        KINDS[kind].drawn(seed, number) if data is None else _redrawn(data[kind], seed, number)
        for number, kind in enumerate(shares)
    ]
    for place in choices([*shares.values()], generator(seed, Purpose.MIX)):
        yield next(streams[place])


def going_on(turns: Conversation, since_s: float) -> tuple[float, Conversation] | None:
    """Return when a conversation that began some time ago sends its next turn, and what is left of it.

    Its history belongs to that turn's prompt: nobody has its KV. An output token is taken to last `TOKEN_S`.

    Args:
        turns: All of it.
        since_s: For how many seconds it goes on by now.

    Returns:
        Seconds from now, and turns; None if it has ended.
    """
    comes_s, history = 0.0, 0
    for place, turn in enumerate(turns):
        comes_s += turn.think_s if place else 0.0
        if comes_s >= since_s:
            first = turn._replace(new_tokens=turn.new_tokens + history)
            return comes_s - since_s, (first, *turns[place + 1 :])
        history += turn.new_tokens + turn.output_tokens
        comes_s += turn.output_tokens * TOKEN_S
    return None


@dataclass(eq=False)
class Conversations:
    """A workload: conversations that begin as a Poisson process. Two rates differ only by a factor on its times.

    It begins `BEFORE_S` before the run, so that the run begins with conversations of all ages.
    """

    conversations: Callable[[], Iterator[Conversation]]
    rate_per_s: float
    seed: int
    ends_s: float
    """Nothing comes at this time or later."""
    context_tokens: int = 32_768
    """A conversation ends before the turn that would exceed it."""
    name: str = "conversations"
    rows: int = 0
    sha256: str = ""

    def start(self) -> Iterator[SimRequest]:
        """Yield first turns, and of conversations that had begun before the next one."""
        for time_s, number, turns in self._coming():
            if time_s >= self.ends_s:
                return
            yield self._request(number, turns, 0, time_s, token_ids.opening(number, turns[0].new_tokens))

    def _coming(self) -> Iterator[tuple[float, int, Conversation]]:
        """Yield conversations by the time at which they are first heard of, without end.

        Those whose history is half the context are left out: they would end soon.
        """
        begun = list[tuple[float, int, Conversation]]()
        times = arrivals.stream(generator(self.seed, Purpose.ARRIVALS), rate_per_s=self.rate_per_s)
        for number, (time_s, turns) in enumerate(zip(times, self.conversations(), strict=False)):
            began_s = time_s - BEFORE_S
            if began_s < 0:
                left = going_on(turns, -began_s)
                if left is not None and left[1][0].new_tokens < self.context_tokens // 2:
                    heapq.heappush(begun, (left[0], number, left[1]))
                continue
            while begun and begun[0][0] <= began_s:
                yield heapq.heappop(begun)
            yield began_s, number, turns

    def after(self, request: SimRequest, finished_s: float, output_ids: Sequence[int]) -> Iterable[SimRequest]:
        """Return the next turn, if there is one and the context has room for it."""
        number, turns, place = (request.meta[name] for name in ("number", "turns", "place"))
        if place + 1 == len(turns) or not output_ids or request.token_ids is None:
            return ()
        turn = turns[place + 1]
        history = [*request.token_ids, *output_ids]
        if len(history) + turn.new_tokens + turn.output_tokens > self.context_tokens:
            return ()
        if (time_s := finished_s + turn.think_s) >= self.ends_s:
            return ()
        ids = history + token_ids.added(number, place + 1, turn.new_tokens)
        return (self._request(number, turns, place + 1, time_s, ids),)

    def _request(self, number: int, turns: Conversation, place: int, time_s: float, ids: list[int]) -> SimRequest:
        meta: dict[str, Any] = {"number": number, "turns": turns, "place": place}
        return SimRequest(
            req_id=f"r{number}.{place}", arrival_s=time_s, prompt_tokens=len(ids),
            output_tokens=turns[place].output_tokens, max_tokens=self.context_tokens - len(ids), token_ids=ids,
            session_id=f"s{number}", meta=meta,
        )  # fmt: skip


def stated(kinds: Iterable[str]) -> dict[str, str]:
    """Return the parameters of kinds, for a result."""
    return {kind: repr(KINDS[kind]) for kind in kinds}
