"""The waiting queue: vLLM's interface, ranks that expire, offers, the arrival-ordered fallback, bounded memory."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from vllm.v1.request import Request, RequestStatus

from vllm_ext.contract import Rank
from vllm_ext.contract.room import AdapterPlaces
from vllm_ext.scheduling.engine_state import adapter_of
from vllm_ext.scheduling.waiting_table import WaitingTable

from .ranks import Ranks


def test_requests_leave_in_the_order_of_their_keys() -> None:
    r = Ranks()
    for name, key in (("c", 3), ("a", 1), ("d", 4), ("b", 2)):
        r.add(name, key)
    assert r.names() == ["a", "b", "c", "d"]
    assert r.drain() == ["a", "b", "c", "d"]
    assert len(r.queue) == 0


def test_ties_end_in_arrival_then_number() -> None:
    r = Ranks()
    r.add("late", arrival=2.0)
    r.add("first", arrival=1.0)
    r.add("second", arrival=1.0)
    assert r.drain() == ["first", "second", "late"]


def test_an_empty_queue_is_false_and_refuses_peek_and_pop() -> None:
    r = Ranks()
    assert not r.queue
    assert len(r.queue) == 0
    assert list(r.queue) == []
    assert r.queue.oldest() is None
    assert list(r.queue.best(5)) == []
    r.queue.begin_step(1.0)
    for call in (r.queue.peek_request, r.queue.pop_request):
        with pytest.raises(IndexError, match="empty"):
            call()


def test_prepending_leaves_the_place_to_the_rank() -> None:
    r = Ranks()
    r.add("b", 2)
    r.queue.prepend_request(r.make("c", 3))
    r.queue.prepend_requests([r.make("d", 4), r.make("a", 1)])
    assert r.drain() == ["a", "b", "c", "d"]


def test_adding_twice_keeps_one() -> None:
    r = Ranks()
    request = r.add("a")
    r.queue.add_request(request)
    r.queue.prepend_request(request)
    assert len(r.queue) == 1
    assert r.drain() == ["a"]


def test_removing_needs_a_member_but_removing_many_does_not() -> None:
    r = Ranks()
    kept, gone, stranger = r.add("kept"), r.add("gone"), r.make("stranger")
    with pytest.raises(ValueError, match="stranger"):
        r.queue.remove_request(stranger)
    r.queue.remove_requests([gone, stranger])
    r.queue.remove_requests({gone})
    assert gone not in r.queue
    assert kept in r.queue
    r.queue.remove_request(kept)
    assert not r.queue


def test_skipped_requests_come_back_to_their_place() -> None:
    """vLLM pops a request that can't run, looks at the next one, and prepends what it skipped."""
    r = Ranks()
    for name, key in (("a", 1), ("b", 2), ("c", 3)):
        r.add(name, key)
    skipped = [r.queue.pop_request(), r.queue.pop_request()]
    assert r.queue.pop_request().request_id == "c"
    r.queue.prepend_requests(reversed(skipped))
    assert r.drain() == ["a", "b"]


def test_a_readded_request_takes_its_new_rank_and_counts_once() -> None:
    r = Ranks()
    r.add("a", 1, level=1)
    r.add("b", 2)
    a = r.queue.pop_request()
    r.ranks["a"] = Rank((3.0,), level=5)
    r.queue.add_request(a)
    assert r.queue.levels == {0: 1, 5: 1}
    assert r.drain() == ["b", "a"]
    assert r.queue.levels == {}


def test_exactly_those_are_served_who_are_offered_in_that_order() -> None:
    r = Ranks()
    for name, key in (("a", 1), ("b", 2), ("c", 3)):
        r.add(name, key)
    r.queue.offer([r.requests["c"], r.make("stranger"), r.requests["a"], r.requests["c"]])
    assert len(r.queue) == 3
    assert r.names() == ["a", "b", "c"]
    assert [x.request_id for x in r.queue.best(3)] == ["a", "b", "c"]
    assert r.drain() == ["c", "a"]
    assert not r.queue
    with pytest.raises(IndexError):
        r.queue.peek_request()
    r.queue.begin_step(0.0)
    assert r.drain() == ["b"]


def test_who_is_put_back_is_not_offered_again_and_nobody_takes_its_place() -> None:
    r = Ranks()
    for name, key in (("a", 1), ("b", 2), ("c", 3)):
        r.add(name, key)
    r.queue.offer([r.requests["b"], r.requests["c"]])
    passed_over = r.queue.pop_request()
    r.queue.prepend_requests([passed_over])
    assert r.queue.peek_request().request_id == "c"
    assert r.drain() == ["c"]
    r.queue.offer(None)
    assert r.drain() == ["a", "b"]


def test_an_offer_that_left_is_passed_over() -> None:
    r = Ranks()
    a, b = r.add("a", 1), r.add("b", 2)
    r.queue.offer([a, b])
    r.queue.remove_requests([a])
    assert r.queue.peek_request() is b
    r.queue.offer([])
    assert not r.queue


def _compiling(r: Ranks, name: str, grammar: object = None) -> Request:
    request = r.make(name, -1.0)
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    state = SimpleNamespace(grammar=grammar, is_grammar_ready=grammar is not None)
    request.structured_output_request = state
    r.queue.add_request(request)
    return request


def test_who_waits_for_a_grammar_hides_nobody_and_returns_to_its_place() -> None:
    r = Ranks()
    blocked = [_compiling(r, f"g{i}") for i in range(100)]
    r.add("b", 2)
    assert len(r.queue) == 101
    assert [x.request_id for x in r.queue.best(3)] == ["b"]
    assert r.queue.peek_request().request_id == "b"
    before = r.queue.changes
    state = blocked[70].structured_output_request
    state.grammar = state.is_grammar_ready = True  # type: ignore[union-attr, misc, assignment]
    for _ in range(2):  # some are looked at in each step, in turn
        r.queue.begin_step(0.0)
    assert [x.request_id for x in r.queue.best(3)] == ["g70", "b"]
    assert r.queue.changes == before + 1
    r.queue.remove_requests(blocked)
    assert r.drain() == ["b"]
    assert sum(_sizes(r.queue)) == 0


def test_a_grammar_that_failed_is_shown_to_vllm_first() -> None:
    """It tells the client; but only about requests that it looks at."""
    r = Ranks()
    failed = _compiling(r, "failed", grammar=ValueError("no grammar"))
    b = r.add("b", 2)
    r.queue.begin_step(0.0)
    assert r.queue.peek_request() is failed, "where nobody in particular is offered, by its rank"
    r.queue.offer([b])
    assert r.queue.pop_request() is failed
    r.queue.prepend_requests([failed])
    assert r.queue.peek_request() is b


def test_whom_vllm_passed_over_stands_apart_and_is_asked_for_in_turn() -> None:
    r = Ranks()
    for i in range(5):
        r.add(f"u{i}", i)
    r.add("b", 9)
    r.queue.begin_step(0.0)
    r.queue.offer([r.requests[f"u{i}"] for i in range(4)])
    r.queue.prepend_requests([r.queue.pop_request() for _ in range(4)])
    assert [x.request_id for x in r.queue.best(9)] == ["u4", "b"]
    assert r.queue.apart() == {"undecided": 4}
    assert len(r.queue) == 6
    r.queue.end_step()
    first, second = r.queue.undecided(3), r.queue.undecided(3)
    assert len({*first, *second}) == 4
    assert r.drain() == ["u0", "u1", "u2", "u3", "u4", "b"], "where vLLM decides itself, it is shown all"
    assert sum(_sizes(r.queue)) == 0


def test_who_is_asked_about_comes_before_those_that_rank_behind_it() -> None:
    r = Ranks()
    for name, key in (("a", 1), ("u", 2), ("b", 3)):
        r.add(name, key)
    r.queue.offer([r.requests["a"], r.requests["b"]], [r.requests["u"], r.make("gone")])
    assert r.drain() == ["a", "u", "b"]


def test_who_is_preempted_after_the_step_it_joined_in_was_not_passed_over() -> None:
    r = Ranks()
    r.add("a")
    r.queue.begin_step(0.0)
    a = r.queue.pop_request()
    r.queue.end_step()
    r.queue.prepend_request(a)
    assert [x.request_id for x in r.queue.best(1)] == ["a"]
    assert r.queue.apart() == {}


def test_an_adapter_without_a_place_hides_nobody() -> None:
    r = Ranks()
    for i in range(300):
        r.add(f"two-{i}", 0, adapter=2)
    r.add("base", 1)
    r.add("one", 2, adapter=1)
    r.queue.begin_step(0.0, AdapterPlaces({1}, 1))
    assert [x.request_id for x in r.queue.best(9)] == ["base", "one"]
    assert r.queue.peek_request().request_id == "two-0", "where vLLM decides itself, it is shown all"
    r.queue.begin_step(0.0, AdapterPlaces(set(), 1))
    look = r.queue.best(400)
    assert next(look).request_id == "two-0"
    r.queue.adapters.take(2)
    assert [x.request_id for x in look] == [*(f"two-{i}" for i in range(1, 300)), "base"]


def test_a_look_leaves_out_an_adapter_whose_place_was_given_away_meanwhile() -> None:
    r = Ranks()
    for name, key, adapter in (("one", 0, 1), ("two", 1, 2), ("base", 2, 0), ("one-too", 3, 1)):
        r.add(name, key, adapter=adapter)
    r.queue.begin_step(0.0, AdapterPlaces(set(), 1))
    seen = []
    for request in r.queue.best(9):
        seen.append(request.request_id)
        r.queue.adapters.take(adapter_of(request))
    assert seen == ["one", "base", "one-too"]


def test_rank_is_asked_again_when_it_expires_and_not_before() -> None:
    r = Ranks()
    r.add("old", 5, until=10.0)
    r.add("new", 1)
    r.asked.clear()
    r.queue.begin_step(9.999)
    assert r.asked == []
    r.ranks["old"] = Rank((0.0,), level=-1)
    r.queue.begin_step(10.0)
    assert r.asked == ["old"]
    assert r.names() == ["old", "new"]
    assert r.queue.levels == {-1: 1, 0: 1}
    r.queue.begin_step(1e9)
    assert r.asked == ["old"], "a rank without an end is not asked for again"


def test_the_number_of_expired_ranks_per_step_is_bounded_and_the_rest_follows() -> None:
    r = Ranks()
    for i in range(30):
        r.add(f"r{i}", i, until=1.0 + i / 100, arrival=i)
    for i in range(30):
        r.ranks[f"r{i}"] = Rank((-1.0 - i,))
    r.asked.clear()
    r.queue.begin_step(5.0)
    assert r.asked == [f"r{i}" for i in range(16)], "the longest overdue first"
    r.queue.begin_step(5.0)
    assert r.drain() == [f"r{i}" for i in reversed(range(30))]


def test_an_expiry_of_a_superseded_rank_is_ignored() -> None:
    r = Ranks()
    a = r.add("a", 1, until=1.0)
    r.ranks["a"] = Rank((2.0,), until_s=50.0)
    r.queue.rerank(a)
    r.asked.clear()
    r.queue.begin_step(10.0)
    assert r.asked == []
    r.queue.pop_request()
    r.queue.begin_step(100.0)
    assert r.asked == [], "a request that left is not ranked"


def test_a_rank_that_is_expired_at_once_does_not_take_the_turns_of_others() -> None:
    """A rounding error suffices: the end of a rank lies at ``now``, and asked again the policy names the same end."""
    r = Ranks()
    r.add("stuck", 1, until=1.0)
    r.add("due", 2, until=1.5)
    r.asked.clear()
    r.queue.begin_step(2.0)
    assert r.asked.count("stuck") == 1
    assert "due" in r.asked


def test_of_outdated_ranks_those_of_who_competes_are_asked_for_before_a_look_and_one_more_in_four_steps() -> None:
    r = Ranks()
    for i in reversed(range(40)):
        r.add(f"r{i}", i)
    r.asked.clear()
    r.queue.prices_changed()
    for _ in range(4):
        r.queue.begin_step(0.0)
    assert r.asked == ["r39"], "the one that was ranked longest ago"
    r.queue.begin_look()
    assert r.asked[1:] == ["r0", "r1"], "the best two"
    r.queue.begin_look()
    assert len(r.asked) == 3, "they are up to date"
    r.ranks["r0"] = Rank((100.0,))
    r.queue.rerank(r.requests["r0"])
    r.queue.begin_look()
    assert r.asked[4:] == ["r2"], "another one competes now"
    for _ in range(4 * 36):
        r.queue.begin_step(0.0)
    assert sorted(r.asked[4:]) == sorted(f"r{i}" for i in range(2, 39))
    for _ in range(4):
        r.queue.begin_step(0.0)
    r.queue.begin_look()
    assert len(r.asked) == 41, "all are up to date"


def test_prices_that_swing_leave_nobody_out() -> None:
    """A round goes on where it was, however often it is started again."""
    r = Ranks()
    for i in range(100):
        r.add(f"r{i}", i)
    r.asked.clear()
    for _ in range(800):
        r.queue.prices_changed()
        r.queue.begin_step(0.0)
        r.queue.begin_look()
    assert set(r.asked) == set(r.requests)
    assert len(r.asked) <= 2 * 800 + 200


def test_ranks_do_not_move_within_a_step() -> None:
    r = Ranks()
    r.add("a", 1, until=1.0)
    r.add("b", 2)
    r.queue.begin_step(0.5)
    r.ranks = {"a": Rank((9.0,)), "b": Rank((0.0,))}
    assert r.queue.peek_request().request_id == "a"
    assert r.drain() == ["a", "b"]


def test_by_arrival_serves_in_order_of_arrival_until_the_next_step() -> None:
    r = Ranks()
    for number, (name, key) in enumerate((("a", 3), ("b", 1), ("c", 2))):
        r.add(name, key, arrival=float(number))
    r.queue.by_arrival = True
    assert r.queue.pop_request().request_id == "a"
    assert r.queue.peek_request().request_id == "b"
    r.queue.begin_step(0.0)
    assert r.drain() == ["b", "c"]


def test_by_arrival_serves_those_who_are_not_offered_too() -> None:
    """The fallback follows no plan, so nothing may be held back in it."""
    r = Ranks()
    r.add("a", 1)
    r.queue.offer([])
    assert not r.queue
    r.queue.by_arrival = True
    assert r.drain() == ["a"]


def test_oldest_is_the_first_arrival_still_here() -> None:
    r = Ranks()
    a = r.add("a", 9, arrival=1.0)
    r.add("b", 1, arrival=2.0)
    assert r.queue.oldest() is a
    r.queue.remove_request(a)
    oldest = r.queue.oldest()
    assert oldest is not None
    assert oldest.request_id == "b"
    r.queue.add_request(a)
    assert r.queue.oldest() is a


def test_looking_at_the_best_changes_nothing() -> None:
    r = Ranks()
    for name, key in (("c", 3), ("a", 1), ("b", 2)):
        r.add(name, key)
    assert [x.request_id for x in r.queue.best(2)] == ["a", "b"]
    for request in r.queue.best(3):
        assert request.request_id == "a"
        break
    assert r.drain() == ["a", "b", "c"]


def test_a_look_that_was_not_finished_loses_no_request() -> None:
    """A policy, or the traceback of one that raised, may keep the iterator alive beyond the step."""
    r = Ranks()
    for name, key in (("a", 1), ("b", 2), ("c", 3)):
        r.add(name, key)
    kept = r.queue.best(3)
    next(kept)
    next(kept)
    r.queue.begin_step(0.0)
    assert r.queue.peek_request().request_id == "a"
    assert r.drain() == ["a", "b", "c"]
    del kept
    assert not r.queue


def test_two_looks_at_once_see_the_same() -> None:
    r = Ranks()
    for name, key in (("a", 1), ("b", 2)):
        r.add(name, key)
    assert [x.request_id for x, _ in zip(r.queue.best(2), r.queue.best(2), strict=False)] == ["a", "b"]


def test_keys_of_different_length_and_size_can_be_compared() -> None:
    r = Ranks()
    r.add("worst")
    r.ranks["worst"] = Rank((math.inf,))
    r.queue.rerank(r.requests["worst"])
    r.make("aged")
    r.ranks["aged"] = Rank(())
    r.queue.add_request(r.requests["aged"])
    r.add("huge", 1e308)
    r.add("tiny", -1e308)
    assert r.drain()[-1] == "worst"


def _sizes(queue: WaitingTable) -> list[int]:
    lines = [line for of_client in queue._lines.values() for line in of_client.values()]
    apart = queue._apart.values()
    return [len(x) for x in (*lines, queue._undecided, queue._expiry, queue._arrivals, queue._entries, *apart)]


@pytest.mark.parametrize("offer", [False, True], ids=["by-rank", "offered"])
def test_memory_follows_the_length_of_the_queue_under_churn(offer: bool) -> None:
    r = Ranks()
    requests = [r.add(f"r{i}", i, until=1e9 + i) for i in range(20)]
    for number in range(3000):
        request = requests[number % 20]
        if offer and number % 7 == 0:
            r.queue.offer([request])
            r.queue.peek_request()
        r.queue.remove_request(request)
        r.queue.add_request(request)
        r.queue.rerank(request)
        r.queue.begin_step(float(number))
        assert max(_sizes(r.queue)) <= 2 * (2 * 20 + 64) + 20, "a line holds each twice, by rank and by arrival"
        assert len(r.queue._lines) <= 1
    r.queue.offer(None)
    assert sorted(r.drain()) == sorted(x.request_id for x in requests)
    assert r.queue.levels == {}
