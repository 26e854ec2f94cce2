"""Conversations: each turn waits for the one before and carries the whole history."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_ext.simulation.workloads.requests import SimRequest, Workload
from vllm_ext.simulation.workloads.token_ids import output_ids

from .parts import jsonl, requests, serve, workload


def chat(folder: Path, *turns: tuple[int, int]) -> str:
    """A conversation whose messages have that many tokens, of 4 ASCII characters each."""
    messages = []
    for question, answer in turns:
        messages.append({"from": "human", "value": "abc " * question})
        messages.append({"from": "gpt", "value": "abc " * answer})
    path = folder / "chat.json"
    path.write_text(json.dumps([{"id": "c", "conversations": messages}]))
    return str(path)


def two_turns(folder: Path, **fields: Any) -> tuple[Workload, SimRequest]:
    load = workload(source=chat(folder, (8, 12), (16, 4)), conversations=True, think_s=30, think="constant", **fields)
    return load, next(load.start())


def test_next_turn_is_the_history_as_it_was_generated_and_what_the_user_adds(tmp_path: Path) -> None:
    load, first = two_turns(tmp_path, keep_text=True)
    output = [11, 12, 13, 2]
    (second,) = load.after(first, 100.0, output)
    assert (first.prompt_tokens, first.output_tokens) == (8, 12)
    assert (second.arrival_s, second.prompt_tokens, second.output_tokens) == (130.0, 8 + 4 + 16, 4)
    ids = list(second.token_ids or ())
    assert (len(ids), ids[:12]) == (28, [*(first.token_ids or ()), *output])
    assert min(ids[12:]) >= 100
    assert [len((r.prompt or "").split()) for r in (first, second)] == [8, 16], "the text is what the user adds"
    assert first.session_id == second.session_id is not None
    assert first.req_id != second.req_id
    assert list(load.after(second, 200.0, [7])) == [], "the last turn"


def test_recorded_turns_arrive_as_recorded_and_begin_with_the_turns_before_and_their_answers(tmp_path: Path) -> None:
    """In a request log they are in the order of their ends, between those of others."""
    logged = [(0.0, 10, 4, "a"), (1.0, 10, 4, "b"), (2.5, 7, 3, None), (2.0, 20, 5, "a"), (3.0, 12, 2, "a")]
    fields = ("arrival_unix_s", "prompt_tokens", "output_tokens", "conversation_id")
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(dict(zip(fields, row, strict=True))) + "\n" for row in logged))
    first, other, second, alone, third = requests(source=str(path), arrivals="recorded")
    assert [r.arrival_s for r in (first, other, second, alone, third)] == [0.0, 1.0, 2.0, 2.5, 3.0]
    ids = [list(r.token_ids or ()) for r in (first, other, second, third)]
    assert [len(one) for one in ids] == [10, 10, 20, 12]
    assert ids[2][:14] == [*ids[0], *output_ids(4, ended=True)], "what the simulated server generates"
    assert ids[3] == ids[2][:12], "a history that was shortened"
    assert ids[1][0] != ids[0][0]
    assert [r.session_id for r in (first, other, second, alone, third)] == ["s0", "s1", "s0", None, "s0"]
    assert alone.token_ids is None


def logged(folder: Path, *rows: dict[str, Any]) -> str:
    return jsonl(folder, *({"output_tokens": 2, "arrival_unix_s": 0.0, **row} for row in rows))


def test_prompts_of_a_request_log_are_served_as_they_were(tmp_path: Path) -> None:
    """Unless they were cut, or stand behind a system prompt that is made up."""
    row = {"prompt_tokens": 4, "prompt_token_ids": [7, 1, 9, 50_000], "conversation_id": "a"}
    path = logged(tmp_path, row, {"prompt_tokens": 3, "hash_ids": [5]})
    first, other = requests(source=path, arrivals="recorded")
    assert (first.token_ids, first.recorded_ids) == ([7, 1, 9, 50_000], True)
    assert (len(other.token_ids or ()), other.recorded_ids) == (3, False)
    for changes in ({"cap_prompt_tokens": 3}, {"system_prompt_tokens": 2}):
        made = requests(source=path, arrivals="recorded", **changes)[0]
        assert not made.recorded_ids
        assert 50_000 not in (made.token_ids or ())


def test_a_sample_of_a_log_arrives_at_the_rate_of_all_requests_and_says_so(tmp_path: Path) -> None:
    path = logged(tmp_path, *({"prompt_tokens": 3, "arrival_unix_s": 4.0 * n, "sample": 0.25} for n in range(3)))
    load = workload(source=path, arrivals="recorded")
    assert [r.arrival_s for r in load.start()] == [0.0, 1.0, 2.0]
    (note,) = load.source.notes
    assert "a sample of 0.25 of the requests" in note
    given = requests(source=path, arrivals="recorded", rate_per_s=0.5)
    assert [r.arrival_s for r in given] == [0.0, 2.0, 4.0], "who names a rate gets it"


def test_after_depends_on_its_arguments_only(tmp_path: Path) -> None:
    load, first = two_turns(tmp_path)
    assert list(load.after(first, 5.0, [9])) == list(load.after(first, 5.0, [9]))


@pytest.mark.parametrize(
    ("fields", "finished_s", "generated", "goes_on"),
    [
        ({}, 1.0, 2, True),
        ({}, 1.0, 0, False),
        ({"max_model_len": 44}, 1.0, 16, True),
        ({"max_model_len": 43}, 1.0, 16, False),
        ({"duration_s": 100, "num_requests": 1}, 69.9, 1, True),
        ({"duration_s": 100, "num_requests": 1}, 70.0, 1, False),
    ],
    ids=["goes on", "failed", "8 + 16 + 16 added + 4 to come fit", "exceeds the context", "in time", "too late"],
)
def test_conversation_ends_early_where_its_next_turn_cannot_begin(
    tmp_path: Path, fields: dict[str, Any], finished_s: float, generated: int, goes_on: bool
) -> None:
    load, first = two_turns(tmp_path, **fields)
    assert len(list(load.after(first, finished_s, [7] * generated))) == goes_on


def test_conversation_ends_with_its_client(tmp_path: Path) -> None:
    load, first = two_turns(tmp_path, abort_share=1, abort_mean_s=10)
    assert first.abort_after_s is not None
    gone_s = first.arrival_s + first.abort_after_s
    assert list(load.after(first, gone_s, [7, 7])) == []
    assert len(list(load.after(first, gone_s - 1e-3, [7, 7]))) == 1


def test_cut_history_loses_its_oldest_tokens_but_keeps_the_system_prompt(tmp_path: Path) -> None:
    load, first = two_turns(tmp_path, max_model_len=50, over_context="cut", system_prompt_tokens=10)
    (second,) = load.after(first, 1.0, list(range(500, 516)))
    ids = list(second.token_ids or ())
    assert second.prompt_tokens == len(ids) == 46
    assert ids[:10] == list(first.token_ids or ())[:10]
    assert ids[10:14] == list(first.token_ids or ())[14:18]
    assert ids[14:30] == list(range(500, 516))


def test_pensieve_clients_react_after_a_minute_on_average_and_add_what_is_in_its_table() -> None:
    """Table 3.2: 37.77 tokens per turn; section 3.6.4: reaction times are exponential."""
    by_number: dict[str, list[SimRequest]] = {}
    for request in serve(workload(source="pensieve-sharegpt", num_requests=2500)):
        by_number.setdefault(request.req_id.split(".")[0], []).append(request)
    pairs = [pair for turns in by_number.values() for pair in itertools.pairwise(turns)]
    gaps = np.array([later.arrival_s - earlier.arrival_s - 2.0 for earlier, later in pairs])
    added = [later.prompt_tokens - earlier.prompt_tokens - earlier.output_tokens for earlier, later in pairs]
    assert (gaps.mean(), gaps.std()) == pytest.approx((60, 60), rel=0.03)
    assert np.mean(added) == pytest.approx(37.77, rel=0.1)


@pytest.mark.parametrize(
    ("bound", "mean", "fewest", "most"),
    [({"min_turns": 5}, 12.23, 5, 1000), ({"max_turns": 4}, 2.596, 1, 4)],
    ids=["long ones", "cut"],
)
def test_a_rate_that_counts_all_turns_counts_those_that_are_left(
    bound: dict[str, int], mean: float, fewest: int, most: int
) -> None:
    fields: dict[str, Any] = {"source": "pensieve-sharegpt", "rate_per_s": 2, "num_requests": 1000, **bound}
    slow, fast = (requests(**fields, rate_counts=counts)[-1].arrival_s for counts in ("requests", "sessions"))
    turns = Counter(r.req_id.split(".")[0] for r in serve(workload(**fields)))
    assert slow / fast == pytest.approx(mean, rel=0.01)
    assert turns.total() / 1000 == pytest.approx(mean, rel=0.05)
    assert fewest <= min(turns.values()) <= max(turns.values()) <= most


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"conversations": True}, r"think_s=None: must be given for recorded conversations"),
        ({"conversations": True, "think_s": 1, "min_turns": 4}, r"no row is left after the filters on lengths and tu"),
        ({"min_turns": 2}, r"min_turns=2: must be left out; .* conversations=true"),
        ({"max_turns": 2}, r"max_turns=2: must be left out; .* conversations=true"),
        ({"conversations": True, "format": "jsonl"}, r"format='jsonl': must be left out; .* sharegpt format"),
    ],
)
def test_recorded_conversations_that_cannot_be_served_are_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        workload(source=chat(tmp_path, (8, 8), (8, 8), (8, 8)), **fields)


@pytest.mark.parametrize(("bounds", "turns"), [({}, 3), ({"min_turns": 3, "max_turns": 3}, 3), ({"max_turns": 2}, 2)])
def test_max_turns_ends_recorded_conversations(tmp_path: Path, bounds: dict[str, int], turns: int) -> None:
    load = workload(source=chat(tmp_path, (8, 8), (8, 8), (8, 8)), conversations=True, think_s=1, **bounds)
    assert (load.rows, len(serve(load))) == (1, turns)
