"""Conversations: each turn waits for the one before and carries the whole history."""

from __future__ import annotations

import itertools
import json
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.simulation.requests import SimRequest, Workload
from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.spec import WorkloadSpec


def workload(**fields: Any) -> Workload:
    return build(WorkloadSpec.model_validate(fields))


def chat(folder: Path, *turns: tuple[int, int]) -> str:
    """A conversation whose messages have that many tokens: 3 words are counted as 4 tokens."""
    messages = []
    for question, answer in turns:
        messages.append({"from": "human", "value": "w " * (question * 3 // 4)})
        messages.append({"from": "gpt", "value": "w " * (answer * 3 // 4)})
    path = folder / "chat.json"
    path.write_text(json.dumps([{"id": "c", "conversations": messages}]))
    return str(path)


def two_turns(folder: Path, **fields: Any) -> tuple[Workload, SimRequest]:
    load = workload(source=chat(folder, (8, 12), (16, 4)), conversations=True, think_s=30, think="constant", **fields)
    return load, next(load.start())


def run(load: Workload, latency_s: float = 2.0) -> list[SimRequest]:
    waiting, served = deque(load.start()), []
    while waiting:
        request = waiting.popleft()
        served.append(request)
        waiting.extend(load.after(request, request.arrival_s + latency_s, [7] * request.output_tokens))
    return served


def test_next_turn_is_the_history_as_it_was_generated_and_what_the_user_adds(tmp_path: Path) -> None:
    load, first = two_turns(tmp_path)
    output = [11, 12, 13, 2]
    (second,) = load.after(first, 100.0, output)
    assert (first.prompt_tokens, first.output_tokens) == (8, 12)
    assert (second.arrival_s, second.prompt_tokens, second.output_tokens) == (130.0, 8 + 4 + 16, 4)
    assert list(second.token_ids or ())[:12] == [*(first.token_ids or ()), *output]
    assert len(second.token_ids or ()) == 28
    assert min(list(second.token_ids or ())[12:]) >= 100
    assert first.session_id == second.session_id is not None
    assert first.req_id != second.req_id
    assert list(load.after(second, 200.0, [7])) == [], "the last turn"


def test_how_many_requests_there_will_be_depends_on_the_run(tmp_path: Path) -> None:
    assert two_turns(tmp_path)[0].expected_requests is None


def test_after_depends_on_its_arguments_only(tmp_path: Path) -> None:
    load, first = two_turns(tmp_path)
    assert list(load.after(first, 5.0, [9])) == list(load.after(first, 5.0, [9]))


@pytest.mark.parametrize(("max_model_len", "turns"), [(44, 2), (43, 1)])
def test_conversation_ends_where_the_next_turn_would_exceed_the_context(
    tmp_path: Path, max_model_len: int, turns: int
) -> None:
    load, first = two_turns(tmp_path, max_model_len=max_model_len)
    following = list(load.after(first, 1.0, [7] * 16))
    assert len(following) == turns - 1, "8 prompt, 16 generated, 16 added, 4 to come: 44"


def test_cut_history_loses_its_oldest_tokens_but_keeps_the_system_prompt(tmp_path: Path) -> None:
    load, first = two_turns(tmp_path, max_model_len=50, over_context="cut", system_prompt_tokens=10)
    (second,) = load.after(first, 1.0, list(range(500, 516)))
    ids = list(second.token_ids or ())
    assert second.prompt_tokens == len(ids) == 46
    assert ids[:10] == list(first.token_ids or ())[:10]
    assert ids[10:14] == list(first.token_ids or ())[14:18]
    assert ids[14:30] == list(range(500, 516))


def test_conversation_ends_with_its_client_or_with_a_failed_turn(tmp_path: Path) -> None:
    load, first = two_turns(tmp_path, abort_share=1, abort_mean_s=10)
    assert first.abort_after_s is not None
    gone_s = first.arrival_s + first.abort_after_s
    assert list(load.after(first, gone_s, [7, 7])) == []
    assert list(load.after(first, gone_s - 1e-3, [])) == []
    assert len(list(load.after(first, gone_s - 1e-3, [7, 7]))) == 1


def test_no_turn_begins_after_the_end(tmp_path: Path) -> None:
    load, first = two_turns(tmp_path, duration_s=100, num_requests=1)
    assert list(load.after(first, 70.0, [7])) == []
    assert len(list(load.after(first, 69.9, [7]))) == 1


def test_prompts_of_conversations_differ_from_the_first_token_on() -> None:
    load = workload(source="pensieve-sharegpt", num_requests=500, min_turns=2)
    firsts = [(r.token_ids or ())[0] for r in load.start()]
    assert len(set(firsts)) == 500


def test_conversation_of_one_turn_shares_nothing_and_carries_no_ids() -> None:
    requests = list(workload(source="pensieve-sharegpt", num_requests=500).start())
    alone = [r for r in requests if r.session_id is None]
    assert 0.25 < len(alone) / 500 < 0.45, "1 - P(at least 2 turns) = 0.35"
    assert all(r.token_ids is None for r in alone)


def test_pensieve_conversations_have_its_turns_lengths_and_reaction_times() -> None:
    """Table 3.2: 5.56 turns, 37.77 tokens in and 204.58 out per turn; section 3.6.4: 36 % have 5 turns or more."""
    served = run(workload(source="pensieve-sharegpt", num_requests=2500))
    by_number: dict[str, list[SimRequest]] = {}
    for request in served:
        by_number.setdefault(request.req_id.split(".")[0], []).append(request)
    turns = np.array([len(requests) for requests in by_number.values()])
    outputs = np.array([r.output_tokens for r in served])
    gaps = np.concatenate([np.diff([r.arrival_s for r in c]) - 2.0 for c in by_number.values()])
    added = [
        later.prompt_tokens - earlier.prompt_tokens - earlier.output_tokens
        for c in by_number.values()
        for earlier, later in itertools.pairwise(c)
    ]
    assert turns.mean() == pytest.approx(5.56, rel=0.06)
    assert (turns >= 5).mean() == pytest.approx(0.36, abs=0.02)
    assert outputs.mean() == pytest.approx(204.58, rel=0.03)
    assert np.mean(added) == pytest.approx(37.77, rel=0.1)
    assert gaps.mean() == pytest.approx(60, rel=0.03)


def test_long_conversations_only_and_a_rate_that_counts_all_turns() -> None:
    """12.2 turns on average once those below 5 are left out."""
    fields: dict[str, Any] = {"source": "pensieve-sharegpt", "min_turns": 5, "rate_per_s": 2, "num_requests": 600}
    by_session, by_request = (workload(**fields, rate_counts=counts) for counts in ("sessions", "requests"))
    slow, fast = list(by_request.start())[-1].arrival_s, list(by_session.start())[-1].arrival_s
    assert len(run(by_session)) / 600 == pytest.approx(slow / fast, rel=0.05)
    assert slow / fast == pytest.approx(12.23, rel=0.01)


def test_client_of_a_closed_loop_finishes_its_conversation_before_the_next() -> None:
    served = run(workload(source="pensieve-sharegpt", arrivals="closed-loop", num_requests=20, think_s=1))
    sessions = [r.req_id.split(".")[0] for r in served]
    assert sessions == sorted(sessions, key=lambda s: int(s[1:]))
    assert len(set(sessions)) == 20


def test_recorded_conversations_need_a_think_time(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"think_s=None: must be given for recorded conversations"):
        workload(source=chat(tmp_path, (8, 8)), conversations=True)


def test_min_turns_filters_recorded_conversations(tmp_path: Path) -> None:
    source = chat(tmp_path, (8, 8), (8, 8))
    assert workload(source=source, conversations=True, think_s=1, min_turns=2).rows == 1
    with pytest.raises(ValueError, match=r"no row is left after the filters on lengths and turns"):
        workload(source=source, conversations=True, think_s=1, min_turns=3)
    with pytest.raises(ValueError, match=r"min_turns=2: must be left out; .* conversations=true"):
        workload(source=source, min_turns=2)


def test_max_turns_ends_recorded_conversations(tmp_path: Path) -> None:
    source = chat(tmp_path, (8, 8), (8, 8), (8, 8))
    served = run(workload(source=source, conversations=True, think_s=1, min_turns=3, max_turns=2 + 1))
    assert len(served) == 3
    assert len(run(workload(source=source, conversations=True, think_s=1, max_turns=2))) == 2
    with pytest.raises(ValueError, match=r"max_turns=2: must be at least min_turns=3"):
        workload(source=source, conversations=True, think_s=1, min_turns=3, max_turns=2)
    with pytest.raises(ValueError, match=r"max_turns=2: must be left out; .* conversations=true"):
        workload(source=source, max_turns=2)


def test_a_rate_that_counts_all_turns_counts_those_that_are_left() -> None:
    fields: dict[str, Any] = {"source": "pensieve-sharegpt", "max_turns": 4, "rate_per_s": 2, "num_requests": 1500}
    by_session, by_request = (workload(**fields, rate_counts=counts) for counts in ("sessions", "requests"))
    slow, fast = list(by_request.start())[-1].arrival_s, list(by_session.start())[-1].arrival_s
    served = run(by_session)
    assert len(served) / 1500 == pytest.approx(slow / fast, rel=0.03)
    assert max(Counter(r.req_id.split(".")[0] for r in served).values()) == 4


def test_text_of_a_turn_is_what_the_user_adds(tmp_path: Path) -> None:
    load, first = two_turns(tmp_path, keep_text=True)
    (second,) = load.after(first, 1.0, [7])
    assert (len((first.prompt or "").split()), len((second.prompt or "").split())) == (6, 12)


@settings(max_examples=40)
@given(
    context=st.integers(64, 2048),
    over=st.sampled_from(["drop", "cut"]),
    system=st.integers(0, 32),
    seed=st.integers(0, 50),
)
def test_no_turn_exceeds_the_context_and_histories_grow_from_what_was_sent(
    context: int, over: str, system: int, seed: int
) -> None:
    load = workload(
        source="pensieve-sharegpt",
        num_requests=8,
        max_model_len=context,
        over_context=over,
        system_prompt_tokens=system,
        seed=seed,
    )
    last: dict[str, SimRequest] = {}
    for request in run(load):
        assert request.prompt_tokens + min(request.output_tokens, request.max_tokens) <= context
        assert request.token_ids is None or len(request.token_ids) == request.prompt_tokens
        if request.session_id is not None:
            before = last.get(request.session_id)
            if before is not None and over == "drop":
                assert list(request.token_ids or ())[: before.prompt_tokens] == list(before.token_ids or ())
            last[request.session_id] = request
