"""Whoever is hidden from vLLM's scheduler: decisions, times, blocks, caches and copies are what they are without."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.extent import quick
from tests.support.preempting import PREEMPTING
from tests.support.simulation_parts import ListWorkload, PerTokenCost, ask, make_engine
from tests.support.systems_matrix import SYSTEMS, Row
from tests.support.tier_parts import offload, own_tier, serve
from vllm_ext.simulation.engine.cohort import Cohort
from vllm_ext.simulation.engine.simulated_engine import SimulatedEngine
from vllm_ext.simulation.spec import RecordSpec
from vllm_ext.simulation.workloads.requests import SimRequest, Slo

_ROWS: list[Row | str] = ["upstream-fcfs", "upstream-priority", *(row for row in SYSTEMS if row.scheduler_cls)]
_PREEMPTING = next(row.options for row in SYSTEMS if row.name == "preempting")


@dataclass(frozen=True)
class Tiered:
    """A system with a KV connector."""

    name: str
    engine: Mapping[str, Any]
    """Of `engine_spec`."""

    def __str__(self) -> str:
        return self.name


def _tiered(name: str, system: str, blocks: int = 40, **tier: Any) -> Tiered:
    options = {key: each for key, each in _PREEMPTING.items() if key != "system"} if system == PREEMPTING else {}
    return Tiered(name, {"system": system, "options": options | own_tier(blocks, **tier)})


_CACHED = {"prefix_caching": True}
_TIERS = (
    Tiered("upstream, offloading", {"system": "upstream-fcfs", "kv_offload": offload(40)}),
    Tiered("upstream, little memory", {"system": "upstream-fcfs", "kv_offload": offload(6)}),
    Tiered(
        "upstream-priority, chunks of two blocks",
        {"system": "upstream-priority", "kv_offload": offload(20, policy="arc", blocks_per_chunk=2)},
    ),
    Tiered("upstream, prompts only", {"system": "upstream-fcfs", "kv_offload": offload(offload_prompt_only=True)}),
    Tiered("fcfs, offloading", {"system": "fcfs", "kv_offload": offload(20)}),
    _tiered("fcfs, early, little memory", "fcfs", 6, store="early"),
    _tiered("fcfs, auto", "fcfs", free_fraction=0.5, load="auto"),
    _tiered("fcfs, all copies, in-step", "fcfs", copies="all", load="in-step"),
    _tiered("preempting, auto", PREEMPTING, store="auto"),
    _tiered("preempting, early, 8 bits", PREEMPTING, store="early", bits=8),
    _tiered("alise, auto", "alise"),
    Tiered("pensieve", {**_tiered("", "pensieve").engine, **_CACHED}),
    _tiered("auto", "auto"),
)
_LONGEST = 320
_FAMILIES = [[1000 * (family + 1) + place for place in range(96)] for family in range(2)]


@st.composite
def workloads(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Requests as plain data: bursts and lulls, shared prefixes, hints, objectives, clients that leave or come back."""
    asked = []
    moment = 0.0
    for number in range(draw(st.integers(3, 16))):
        moment += draw(st.sampled_from([0.0, 0.0, 0.03125, 0.5, 4.0]))
        output = draw(st.integers(1, 90))
        asked.append(
            {
                "req_id": f"r{number}",
                "arrival_s": moment,
                "prompt": draw(st.one_of(st.integers(1, 40), st.integers(60, 120))),
                "output": output,
                "max_tokens": draw(st.sampled_from([output, 40, 100])),
                "shared": draw(st.sampled_from([None, 0, 1])),
                "osl": draw(st.sampled_from([None, output, 5, 60])),
                "priority": draw(st.integers(-1, 1)),
                "tbt_s": draw(st.sampled_from([None, 0.05, 0.4])),
                "abort_after_s": draw(st.sampled_from([None, None, None, 0.25, 1.5])),
                "turns": draw(st.sampled_from([0, 0, 1, 2])),
            }
        )
    return asked


def _request(asked: Mapping[str, Any]) -> SimRequest:
    own = [100 + (37 * len(asked["req_id"]) + 7 * place + asked["prompt"]) % 800 for place in range(asked["prompt"])]
    family = asked["shared"]
    ids = own if family is None else (_FAMILIES[family] + own)[: asked["prompt"]]
    return ask(
        asked["req_id"],
        asked["arrival_s"],
        len(ids),
        asked["output"],
        max_tokens=asked["max_tokens"],
        token_ids=ids,
        extra_args={"tag": f"client {asked['priority']}", **({} if asked["osl"] is None else {"osl": asked["osl"]})},
        priority=asked["priority"],
        slo=Slo(tbt_s=asked["tbt_s"]),
        abort_after_s=asked["abort_after_s"],
        meta={"turns": asked["turns"]},
    )


def _next_turn(request: SimRequest, finished_s: float, output_ids: Sequence[int]) -> Iterable[SimRequest]:
    """What a client of a conversation sends next: all that was said, and a little more."""
    turns = request.meta["turns"]
    ids = [*(request.token_ids or ()), *output_ids, 7, 8, 9]
    if not turns or len(ids) > _LONGEST - 100:
        return
    yield ask(
        f"{request.req_id}+",
        finished_s + 0.25,
        len(ids),
        request.output_tokens,
        max_tokens=request.max_tokens,
        token_ids=ids,
        priority=request.priority,
        meta={"turns": turns - 1},
    )


def _outcome(engine: SimulatedEngine) -> dict[str, Any]:
    """Everything that a run leaves behind."""
    scheduler, collector = engine.scheduler, engine.collector
    pool = scheduler.kv_cache_manager.block_pool
    cached = pool.cached_block_hash_to_block._cache
    blocks = {key: found.block_id if hasattr(found, "block_id") else list(found) for key, found in cached.items()}
    gaps, backlog = collector.gaps, collector.backlog
    assert backlog is not None
    found = {
        "decisions": engine.decisions,
        "rows": [repr(row) for row in collector.table.rows()],
        "times": [list(times or ()) for times in collector.table.token_times],
        "gaps": (gaps.count, gaps.total_s, gaps.min_s, gaps.max_s),
        "areas": (collector.running_area, collector.waiting_area, collector.kv_area, collector.device_busy_s),
        "events": collector.events,
        "backlog": backlog.counters(),
        "end": engine.clock(),
        "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        "cached": blocks,
    }
    observer = getattr(scheduler, "observer", None)
    if observer is not None:
        counters = asdict(observer.counters)
        del counters["policy_s"]  # measured on the wall's clock
        found |= {"counters": counters, "runtime": observer.timer.sink.coefficients, "records": observer.book.since(0)}
    return found


class _Copies:
    """Stands for an auditor: notes every copy, and when it is through."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self._steps = 0

    def submitted(self, job_id: int, direction: Any, device: Any, host: Any) -> None:
        self.seen.append((self._steps, job_id, direction, list(device.block_ids), list(host.block_ids)))

    def finished(self, job_id: int) -> None:
        self.seen.append((self._steps, job_id))

    def moved(self, output: Any) -> None:
        """Nothing moves on the device."""

    def launched(self, output: Any) -> None:
        self._steps += 1


def _run(
    row: Row | Tiered | str, asked: Sequence[Mapping[str, Any]], engine: Mapping[str, Any], exact: bool
) -> tuple[SimulatedEngine, dict[str, Any]]:
    """Return the engine that ran, and all that is to be the same either way."""
    workload = ListWorkload([_request(each) for each in asked], _next_turn)
    if isinstance(row, Tiered):
        record = RecordSpec(token_times=True, events=100_000, backlog=True, decisions=True)
        engine = {**engine, "max_model_len": _LONGEST, **row.engine}
        server = serve(workload, PerTokenCost(), record=record, exact=exact, run=False, **engine)
        assert server.tier is not None
        copies = server.tier.copies.auditor = _Copies()
        server.engine.run()
        return server.engine, {**_outcome(server.engine), "copies": copies.seen, "tier": server.counters}
    options = {} if isinstance(row, str) else {key: each for key, each in row.options.items() if key != "allow_oracle"}
    system = row if isinstance(row, str) else options.pop("system")
    made = make_engine(
        workload,
        PerTokenCost(),
        system=system,
        options=options,
        exact=exact,
        events=100_000,
        backlog=True,
        max_model_len=_LONGEST,
        **engine,
    )
    made.run()
    return made, _outcome(made)


_ENGINES: dict[str, st.SearchStrategy[Any]] = {
    "num_blocks": st.sampled_from([21, 24, 40, 120]),
    "max_num_seqs": st.integers(2, 8),
    "max_num_batched_tokens": st.sampled_from([16, 64]),
    "prefix_caching": st.sampled_from([True, True, False]),
    "async_scheduling": st.booleans(),
}


def _compare(row: Row | Tiered | str, examples: int, engines: Mapping[str, st.SearchStrategy[Any]]) -> None:
    hidden, steps = [0], [0]

    @settings(max_examples=examples)
    @given(asked=workloads(), engine=st.fixed_dictionaries(dict(engines)))
    def check(asked: list[dict[str, Any]], engine: dict[str, Any]) -> None:
        (_, wanted), (quickly, found) = (_run(row, asked, engine, exact) for exact in (True, False))
        assert isinstance(quickly.scheduler, Cohort)
        assert found.keys() == wanted.keys()
        for name in wanted:
            assert found[name] == wanted[name], name
        hidden[0] += quickly.scheduler.tokens_hidden
        steps[0] += sum(len(decision.scheduled) for decision in quickly.decisions or ())

    check()
    assert hidden[0] > 0.2 * steps[0], "hardly anybody was hidden: the comparison says little"


@pytest.mark.parametrize("row", _ROWS, ids=str)
def test_nothing_changes_whoever_is_hidden(row: Row | str) -> None:
    examples = 12 if isinstance(row, str) else row.examples
    _compare(row, quick(max(2, examples // 5), full=2 * examples), _ENGINES)


@pytest.mark.parametrize("row", _TIERS, ids=str)
def test_every_copy_is_the_same_whoever_is_hidden(row: Tiered) -> None:
    _compare(row, quick(8, full=50), _ENGINES | {"blocks_per_s": st.sampled_from([20.0, 200.0, 2000.0])})
