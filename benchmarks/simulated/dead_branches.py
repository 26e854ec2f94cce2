"""How much of a history does host memory find where the chat template drops what the model thought?

Question: models that reason put their thinking in front of the answer, and their templates leave it out of the next
turn's prompt, so that nobody asks again for most of what was generated. Stored all the same it pushes out what others
ask for; left out where templates drop nothing, every answer is computed again. Does ``prompt_only: auto`` do as well as
the better of the two settings, and is it worth it to evict first what a turn has left behind?

Method: no engine; the real books of host memory, evictions and conversations in virtual time, asked as the connector
asks them. 60 conversations of 6 turns begin within some minutes; each turn adds 60 tokens and is answered with 150,
behind 0 or 600 tokens of thinking, and the next comes 5 s and an exponential minute later. Chunks are of 32 tokens.
Rows: vLLM's own manager with ``lru`` and ``arc``, storing prompts only, which is its default, or all; ours with
``retention`` and each setting, storing a chunk as soon as it is full (early) or when its request has ended (ahead);
``in turn`` are rows whose abandoned branches are evicted when it is their turn; in ``no names`` clients name no
conversations, so that next turns must be recognised.
The measure is the share of the histories' whole chunks that is found, from the front. Deterministic given the seed.

    python benchmarks/simulated/dead_branches.py --quick
    python benchmarks/simulated/dead_branches.py --out benchmarks/results/dead_branches.json
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from statistics import mean
from typing import Any, NamedTuple

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.request import Request

from vllm_ext.config.kv_tier import AHEAD, AUTO, EARLY, RETENTION
from vllm_ext.kv.conversations.keeper import Keeper
from vllm_ext.kv.eviction.retention import Chain, default_cost
from vllm_ext.kv.host.manager import TierManager
from vllm_ext.report.claim import Claim
from vllm_ext.report.results import Result, Workload, argument_parser, command, emit
from vllm_ext.report.table import Table
from vllm_ext.simulation.engine.harness import block_hasher, make_request

CAPACITIES, THOUGHTS = (400, 800, 1600), (0, 600)
CHUNK, USER, ANSWER = 32, 60, 150
"""Tokens."""
CONVERSATIONS, TURNS = 60, 6
_UNEXPLAINED = "not explained yet"
WITHIN = 0.05
"""How far `auto` may stay behind the better fixed setting, as a share of that."""


class Turn(NamedTuple):
    """A request that ended, with what it generated."""

    at: float
    session: str
    request: Request
    keys: list[OffloadKey]
    """All its chunks."""
    history_chunks: int


class Setting(NamedTuple):
    """How host memory is kept."""

    policy: str = RETENTION
    prompt_only: bool | str = AUTO
    store: str = AHEAD
    dead_first: bool = True
    """Whether branches that a turn has left behind go first; where vLLM keeps the books, none do."""
    named: bool = True
    """Whether clients name their conversations."""

    def __str__(self) -> str:
        kept = {True: "prompts", False: "all", AUTO: AUTO}[self.prompt_only]
        if self.policy != RETENTION:
            return f"vllm {self.policy}, {kept}"
        return f"{kept}, {self.store}{'' if self.dead_first else ', in turn'}{'' if self.named else ', no names'}"


UPSTREAM = [Setting(policy, prompt_only) for policy in ("lru", "arc") for prompt_only in (True, False)]
OURS = [Setting(RETENTION, True), Setting(RETENTION, False), Setting(), Setting(store=EARLY), Setting(named=False)]
IN_TURN = [setting._replace(dead_first=False) for setting in OURS[:3]]


def conversations(thought: int, seed: int) -> Iterator[Turn]:
    """Yield all turns in the order in which they come; templates leave out ``thought`` tokens of each answer."""
    rng, hasher = random.Random(seed), block_hasher(CHUNK)
    histories: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
    coming = [(rng.expovariate(1 / 60), number, 0) for number in range(CONVERSATIONS)]
    coming.sort()
    while coming:
        at, number, turn = heappop(coming)
        history = histories[number]
        user, thinking, answer = ([rng.randrange(100, 4000) for _ in range(n)] for n in (USER, thought, ANSWER))
        request = make_request(f"{number}-{turn}", history + user, hasher=hasher)
        request.append_output_token_ids(thinking + answer)
        keys = [make_offload_key(block, 0) for block in request.block_hashes]
        yield Turn(at, f"s{number}", request, keys, len(history) // CHUNK)
        histories[number] = history + user + answer
        if turn + 1 < TURNS:
            heappush(coming, (at + 5 + rng.expovariate(1 / 60), number, turn + 1))


def found_share(turns: Sequence[Turn], setting: Setting, capacity: int) -> float:
    """Return the share of the histories' chunks that is found in host memory with room for so many chunks."""
    tier = _Tier(setting, capacity)
    found = sum(tier.serve(turn) for turn in turns)
    return found / sum(turn.history_chunks for turn in turns)


class _Tier:
    """Books, asked as a connector does."""

    def __init__(self, setting: Setting, capacity: int) -> None:
        self._setting, self._now = setting, 0.0
        kind = TierManager if setting.policy == RETENTION else CPUOffloadingManager
        self._manager: Any = kind(capacity, cache_policy=setting.policy)
        self._keeper: Keeper | None = None
        if setting.policy == RETENTION:
            self._keeper = Keeper(self._manager, prompt_only=setting.prompt_only)
            self._keeper.use(lambda: self._now, default_cost)
            if not setting.dead_first:
                self._manager.policy.let_go = lambda *_: None

    def serve(self, turn: Turn) -> int:
        """Let a request come, find what is there, and end; return how many chunks of its history it found."""
        self._now, prompt_chunks = turn.at, turn.request.num_prompt_tokens // CHUNK
        prompt, manager, keeper = turn.keys[:prompt_chunks], self._manager, self._keeper
        context = ReqContext(turn.request.request_id)
        manager.on_new_request(context)
        context.set_state(Chain({0: turn.keys}, {0: CHUNK}))
        for number, key in enumerate(turn.keys):
            context.set_offload_key_position(key, (number + 1) * CHUNK)
        turn.request.session_id = turn.session if self._setting.named else None
        followed = None if keeper is None else keeper.enter(turn.request, prompt, self._now)
        if followed is not None:
            context.set_state(followed)
        found = 0
        while found < turn.history_chunks and manager.lookup(turn.keys[found], context) is LookupResult.HIT:
            found += 1
        manager.touch(turn.keys[:found], context)
        kept = prompt if self._setting.prompt_only is True else turn.keys
        if self._setting.store == EARLY:
            self._store(kept, context)
        if keeper is not None and followed is not None:
            keeper.leave(followed, turn.keys, self._now, turn.request.output_token_ids)
            kept = kept[: int(min(len(kept), followed.kept_tokens // CHUNK))]
        if self._setting.store == AHEAD:
            self._store(kept, context)
        manager.on_request_finished(context)
        return found

    def _store(self, keys: Sequence[OffloadKey], context: ReqContext) -> None:
        stored = self._manager.prepare_store(keys, context)
        if stored is not None:
            self._manager.complete_store(stored.keys_to_store, context)


def main(argv: Sequence[str]) -> None:
    """Serve every scene with every setting, print, write."""
    parser = argument_parser(__doc__)
    args = parser.parse_args(argv)
    seeds = [args.seed + number for number in range(1 if args.quick else 2)]
    settings = [*UPSTREAM, *OURS, *IN_TURN]
    shares: dict[str, dict[str, float]] = {str(setting): {} for setting in settings}
    checksum, num_turns = hashlib.sha256(), len(seeds) * CONVERSATIONS * TURNS
    for thought in THOUGHTS:
        scenes = [list(conversations(thought, seed)) for seed in seeds]
        checksum.update(b"".join(key for turns in scenes for turn in turns for key in turn.keys))
        for capacity in CAPACITIES:
            for setting in settings:
                found = mean(found_share(turns, setting, capacity) for turns in scenes)
                shares[str(setting)][f"chunks_{capacity}.thinking_{thought}.found_share"] = round(found, 4)
    result = Result(
        name="dead_branches",
        command=command(argv, __file__),
        config={"seeds": seeds, "conversations": CONVERSATIONS, "turns": TURNS, "chunk_tokens": CHUNK},
        seed=args.seed,
        workload=Workload(name="conversations that think", rows=num_turns, sha256=checksum.hexdigest()),
        metrics={f"{name}.{scene}": share for name in map(str, OURS) for scene, share in shares[name].items()},
        baselines={str(setting): shares[str(setting)] for setting in [*UPSTREAM, *IN_TURN]},
        claims=[*_claims(shares)],
    )
    scenes_of = shares[str(OURS[0])]
    rows = [[name, *(shares[name][scene] for scene in scenes_of)] for name in shares]
    header = ["found share of histories", *(scene.removesuffix(".found_share") for scene in scenes_of)]
    emit(result, [Table(header, rows)], args.out)


def _claims(shares: dict[str, dict[str, float]]) -> Iterator[Claim]:
    prompts, everything = (shares[str(setting)] for setting in OURS[:2])
    for auto in OURS[2:]:
        for scene, share in shares[str(auto)].items():
            value = round(share / max(prompts[scene], everything[scene]), 4)
            metric = f"{scene}: {auto} over the better of prompts and all"
            note = "" if auto.store == AHEAD else "what a request generates is there until it ends, for a preemption"
            yield Claim(name=metric, value=value, op=">=", goal=1 - WITHIN, facts=note or _UNEXPLAINED)
    for first, in_turn in zip(OURS, IN_TURN, strict=False):
        for scene, share in shares[str(first)].items():
            value = round(share / shares[str(in_turn)][scene], 4)
            metric = f"{scene}: {first} over the same with abandoned branches in turn"
            yield Claim(name=metric, value=value, op=">=", goal=1.0, facts=_UNEXPLAINED)


if __name__ == "__main__":
    main(sys.argv[1:])
