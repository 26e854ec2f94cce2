"""Routers: costs by hand, what load and warmth do to a choice, and what a fleet makes of reports that get lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.routing.fleet import Ask, Fleet
from vllm_ext.routing.routers import ROUTERS, Hashed, Home, Least, Marginal, RoundRobin, make_router
from vllm_ext.scheduling.load_report.report import Held, LoadReport, Prices, session_key

PRICES = Prices(base_s=0.01, prefill_token_s=1e-4, decode_s=1e-4, context_token_s=1e-7, host_token_s=1e-5)
IDLE = LoadReport(
    number=1, running=0, waiting=0, seats=64, prefill_tokens=0, context_tokens=0, pool_tokens=100_000,
    output_tokens=100.0, prices=PRICES,
)  # fmt: skip


def fleet_of(*reports: LoadReport | None, now: float = 0.0, **fields: Any) -> Fleet:
    """Replicas a, b, c, ..., with these reports."""
    fleet = Fleet(**fields)
    names = "abcdefgh"[: len(reports)]
    fleet.consist_of(names)
    for name, report in zip(names, reports, strict=True):
        if report is not None:
            assert fleet.heard(name, report, now)
    return fleet


def cost(report: LoadReport, ask: Ask, weight: float = 3.0) -> float:
    fleet = fleet_of(report)
    return Marginal(weight=weight).cost(ask, fleet.replicas["a"], report, 100.0)


def test_a_cost_by_hand() -> None:
    """An idle replica: 1000 tokens take 0.1 s, then 100 steps of 10 ms, and 0.2 ms more for the request itself."""
    assert cost(IDLE, Ask(1000)) == pytest.approx(3 * (0.1 + 100 * (0.01 + 2e-4)))
    # 10 requests with 20,000 tokens: steps take 1 + 2 ms more; each of the ten waits 0.1 s and 100 times 0.2 ms longer.
    busy = replace(IDLE, running=10, context_tokens=20_000)
    assert cost(busy, Ask(1000)) == pytest.approx(3 * (0.1 + 100 * (0.013 + 2e-4)) + 10 * (0.1 + 100 * 2e-4))
    queued = replace(IDLE, prefill_tokens=5000)
    assert cost(queued, Ask(1000)) == pytest.approx(cost(IDLE, Ask(1000)) + 3 * 0.5)
    # 600 tokens are on the device, 300 more in host memory: 100 are computed, and 300 loaded in 3 ms.
    warm = replace(IDLE, resident={"s": Held(600, 900)})
    assert cost(warm, Ask(1000, "s")) == pytest.approx(3 * (0.01 + 0.003 + 100 * (0.01 + 2e-4)))


def test_memory_and_seats_that_are_taken_cost_a_wait() -> None:
    """A step takes 20 ms, an average request has 50 of them left."""
    full = replace(IDLE, context_tokens=100_000)
    assert cost(full, Ask(1000)) - cost(replace(full, pool_tokens=1_000_000), Ask(1000)) == pytest.approx(
        3 * (1100 / 100_000) * 50 * 0.02
    )
    seated = replace(IDLE, running=1, seats=1)
    assert cost(seated, Ask(1000)) - cost(replace(seated, seats=2), Ask(1000)) == pytest.approx(3 * 25 * 0.0101)


def test_of_three_replicas_the_one_with_the_history_is_taken_until_it_costs_more() -> None:
    """8,000 tokens take 0.8 s to compute, and count twice where they are at home elsewhere; 100 steps take 1 s."""
    warm = replace(IDLE, resident={"s": Held(8000)})
    ask = Ask(8100, "s")
    assert Marginal().choose(ask, fleet_of(IDLE, warm, IDLE), 0.0) == "b"
    assert Marginal().choose(ask, fleet_of(IDLE, replace(warm, prefill_tokens=15_500), IDLE), 0.0) == "b"
    assert Marginal().choose(ask, fleet_of(IDLE, replace(warm, prefill_tokens=18_500), IDLE), 0.0) == "a"
    alone = Marginal(again=0.0, stay=0.0)
    assert alone.choose(ask, fleet_of(IDLE, replace(warm, prefill_tokens=7500), IDLE), 0.0) == "b"
    assert alone.choose(ask, fleet_of(IDLE, replace(warm, prefill_tokens=8500), IDLE), 0.0) == "a"


def test_what_another_replica_has_of_a_history_is_not_left_behind() -> None:
    queued = replace(IDLE, prefill_tokens=15_500, resident={"s": Held(8000)})
    fleet = fleet_of(replace(IDLE, resident={"s": Held(0, 7900)}), queued)
    fleet.homes["s"] = "b"
    assert Marginal().choose(Ask(8100, "s"), fleet, 0.0) == "a"


def test_a_replica_whose_requests_were_short_is_no_cheaper() -> None:
    lately_short = replace(IDLE, output_tokens=1.0, running=1)
    assert Marginal().choose(Ask(100), fleet_of(lately_short, IDLE), 0.0) == "b"


def test_a_conversation_stays_where_that_costs_little_more() -> None:
    slower = replace(IDLE, prices=replace(PRICES, base_s=0.0103))
    fleet = fleet_of(IDLE, slower)
    fleet.homes["s"] = "b"
    assert Marginal().choose(Ask(100, "s"), fleet, 0.0) == "b"
    assert Marginal(stay=0.0).choose(Ask(100, "s"), fleet, 0.0) == "a"
    assert Marginal().choose(Ask(100, "other"), fleet, 0.0) == "a"


def test_what_was_sent_is_held_until_a_report_tells_or_for_a_minute() -> None:
    """Agents ask again before the next report, and of chats without a name no report tells."""
    fleet = fleet_of(IDLE, IDLE)
    ask = Ask(8000, "s")
    first = Marginal().choose(ask, fleet, 0.0)
    for now in (0.0, 0.1, 0.2):
        assert Marginal().choose(ask, fleet, now) == first
        fleet.sent(first, ask, now)
    assert fleet.replicas[first].held("s") == Held(8000)
    fleet.heard(first, replace(IDLE, number=2, resident={"s": Held(500)}), 1.0)
    assert fleet.replicas[first].held("s") == Held(500)
    fleet.sent(first, Ask(9000, "t"), 2.0)
    fleet.heard(first, replace(IDLE, number=3), 30.0)
    assert fleet.replicas[first].held("t") == Held(9000)
    fleet.sent(first, Ask(1, "u"), 63.0)
    assert [*fleet.replicas[first].expected] == ["u"]


def test_prices_stand_for_a_quarter_of_a_second_but_a_newcomer_s_are_there_at_once() -> None:
    fleet = fleet_of(IDLE, None)
    sure = replace(PRICES, steps=10**9)
    assert fleet.prices(0.0)["a"].base_s == pytest.approx(PRICES.base_s)
    fleet.heard("a", replace(IDLE, number=2, prices=replace(sure, base_s=0.02)), 0.1)
    assert fleet.prices(0.2)["a"].base_s == pytest.approx(PRICES.base_s)
    assert fleet.prices(0.3)["a"].base_s == pytest.approx(0.02)
    fleet.heard("b", replace(IDLE, prices=sure), 0.4)
    assert fleet.prices(0.4).keys() == {"a", "b"}


def test_what_was_sent_since_the_report_counts() -> None:
    """Or all go where somebody was idle a second ago."""
    fleet, chosen = fleet_of(IDLE, IDLE, IDLE), []
    for _ in range(6):
        chosen.append(Marginal().choose(Ask(2000), fleet, 0.5))
        fleet.sent(chosen[-1], Ask(2000), 0.5)
    assert sorted(chosen) == ["a", "a", "b", "b", "c", "c"]
    for name in "abc":
        fleet.heard(name, replace(IDLE, number=2), 1.0)
    assert all(not replica.sent and not replica.sent_prefill_tokens for replica in fleet.replicas.values())


def test_what_was_sent_just_before_a_report_may_not_be_in_it() -> None:
    fleet = fleet_of(IDLE, lag_s=0.25)
    fleet.sent("a", Ask(500), 0.8)
    fleet.sent("a", Ask(700), 0.9)
    fleet.heard("a", replace(IDLE, number=2), 1.1)
    assert (fleet.replicas["a"].sent_prefill_tokens, fleet.replicas["a"].requests) == (700, 1)


def test_new_conversations_go_round_among_those_that_cost_about_the_same() -> None:
    """A difference of half a percent is no reason to fill one replica's memory with conversations that come back."""
    odd = replace(IDLE, prices=replace(PRICES, base_s=0.01005))
    fleet, chosen = fleet_of(odd, IDLE, IDLE), []
    for number in range(6):
        ask = Ask(100, f"talk {number}")
        chosen.append(Marginal().choose(ask, fleet, float(number)))
        fleet.sent(chosen[-1], ask, float(number))
        for name, report in zip("abc", (odd, IDLE, IDLE), strict=True):
            fleet.heard(name, replace(report, number=number + 2), number + 0.9)
    assert sorted(chosen) == ["a", "a", "b", "b", "c", "c"]


def priced(steps: int, times: float = 1.0) -> LoadReport:
    terms = ("base_s", "prefill_token_s", "decode_s", "context_token_s", "host_token_s")
    return replace(IDLE, prices=replace(PRICES, steps=steps, **{name: times * getattr(PRICES, name) for name in terms}))


def test_an_engine_that_has_served_little_is_not_taken_for_slow_by_a_few_odd_steps() -> None:
    """Its first steps say it is 20 times slower; it would get nothing more, and never learn better."""
    fleet = fleet_of(priced(50, 20.0), priced(5000))
    found = fleet.prices(0.0)
    assert found["a"].prefill_token_s < 1.3 * PRICES.prefill_token_s
    assert found["b"].prefill_token_s == pytest.approx(PRICES.prefill_token_s, rel=0.01)
    assert found["a"].steps == 50


def test_an_engine_that_is_slow_is_known_as_such_once_it_has_served_for_long() -> None:
    fleet = fleet_of(priced(20_000, 2.0), priced(20_000), priced(20_000))
    times = {name: one.base_s / PRICES.base_s for name, one in fleet.prices(0.0).items()}
    assert times["a"] > 1.9
    assert times["b"] == times["c"] < 1.05
    sure = fleet_of(priced(1_000_000, 2.0), priced(1_000_000))
    assert [one.base_s for one in sure.prices(0.0).values()] == [2 * PRICES.base_s, PRICES.base_s]


def test_a_term_that_a_fit_prices_at_nothing_does_not_make_it_free_for_all() -> None:
    free = replace(IDLE, prices=replace(PRICES, steps=100, decode_s=0.0, host_token_s=0.0))
    other = replace(IDLE, prices=replace(PRICES, steps=5000, host_token_s=0.0))
    found = fleet_of(free, other).prices(0.0)
    assert 0.3 * PRICES.decode_s < found["a"].decode_s < PRICES.decode_s
    assert found["b"].decode_s == pytest.approx(PRICES.decode_s, rel=0.2)
    assert found["a"].host_token_s == 0


def test_prices_follow_reports_and_who_is_there() -> None:
    fleet = fleet_of(priced(5000), None)
    assert fleet.prices(0.0).keys() == {"a"}
    fleet.heard("b", priced(5000, 3.0), 1.0)
    assert fleet.prices(1.0)["b"].base_s > 2 * PRICES.base_s
    fleet.consist_of("b")
    assert fleet.prices(1.0)["b"].base_s == pytest.approx(3 * PRICES.base_s)


def test_who_says_that_it_cannot_serve_is_out_until_it_reports() -> None:
    fleet = fleet_of(IDLE, IDLE)
    fleet.withdraw("a", 1.0)
    fleet.withdraw("nobody", 1.0)
    assert [one.name for one in fleet.rotation(3.0)] == ["b"]
    fleet.heard("a", replace(IDLE, number=2), 1.5)
    assert [one.name for one in fleet.rotation(1.6)] == ["b"], "it rests"
    assert [one.name for one in fleet.rotation(2.1)] == ["a", "b"]


def test_an_illness_a_day_later_is_the_first_again_and_many_are_no_error() -> None:
    fleet = fleet_of(IDLE, IDLE)
    for number in range(1100):
        now = 100.0 * number
        fleet.withdraw("a", now)
        assert [one.name for one in fleet.rotation(now + 0.5)] in (["b"], ["a", "b"])
    later = now + 86_400.0
    fleet.heard("a", replace(IDLE, number=2), later)
    fleet.withdraw("a", later + 1)
    assert fleet.replicas["a"].times_out == 1


def test_routers_that_know_less() -> None:
    fleet = fleet_of(replace(IDLE, running=3), replace(IDLE, running=1), replace(IDLE, running=20))
    robin = RoundRobin()
    assert [robin.choose(Ask(1), fleet, 0.0) for _ in range(4)] == ["a", "b", "c", "a"]
    assert Least().choose(Ask(1), fleet, 0.0) == "b"
    fleet.homes["s"] = "c"
    assert Home(most_above=19).choose(Ask(1, "s"), fleet, 0.0) == "c"
    assert Home(most_above=18).choose(Ask(1, "s"), fleet, 0.0) == "b"
    of = {session: Hashed().choose(Ask(1, session), fleet, 0.0) for session in map(str, range(60))}
    assert {*of.values()} == {"a", "b", "c"}
    fleet.consist_of("ac")
    moved = {session for session, name in of.items() if Hashed().choose(Ask(1, session), fleet, 0.0) != name}
    assert moved == {session for session, name in of.items() if name == "b"}, "only those of the one that left"


def test_of_equals_the_one_that_waited_longest_is_taken() -> None:
    fleet = fleet_of(None, None, None)
    chosen = []
    for now in range(6):
        chosen.append(Least().choose(Ask(1), fleet, now))
        fleet.sent(chosen[-1], Ask(1), now)
        fleet.ended(chosen[-1])
    assert chosen == ["a", "b", "c", "a", "b", "c"]


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_has_a_name_and_an_empty_fleet_is_an_error(name: str) -> None:
    router = make_router(name)
    with pytest.raises(LookupError, match="no replica is known"):
        router.choose(Ask(1), Fleet(), 0.0)
    assert router.choose(Ask(1, "s"), fleet_of(None), 0.0) == "a"


def test_an_unknown_router_is_refused() -> None:
    with pytest.raises(ValueError, match="router='best': must be one of round-robin, least, hash, home, marginal"):
        make_router("best")


# --- laws -------------------------------------------------------------------------------------------------------------

counts = st.integers(0, 200)
reports = st.builds(
    lambda running, waiting, prefill, context, device, host: replace(
        IDLE, running=running, waiting=waiting, prefill_tokens=prefill, context_tokens=context,
        resident={"s": Held(device, host)},
    ),
    counts, counts, st.integers(0, 50_000), st.integers(0, 200_000), st.integers(0, 5000), st.integers(0, 5000),
)  # fmt: skip
asks = st.builds(Ask, st.integers(1, 9000), st.sampled_from([None, "s"]))


@given(st.lists(reports, min_size=2, max_size=5), asks, st.data())
def test_load_never_attracts(those: Sequence[LoadReport], ask: Ask, data: st.DataObject) -> None:
    """Whoever was not taken is not taken with more to do."""
    chosen = Marginal().choose(ask, fleet_of(*those), 0.0)
    other = data.draw(st.sampled_from(range(len(those))).filter(lambda at: "abcde"[at] != chosen))
    field = data.draw(st.sampled_from(["running", "waiting", "prefill_tokens", "context_tokens"]))
    more = getattr(those[other], field) + data.draw(st.integers(1, 10_000))
    loaded = [replace(one, **{field: more}) if at == other else one for at, one in enumerate(those)]
    assert Marginal().choose(ask, fleet_of(*loaded), 0.0) != "abcde"[other]


@given(st.lists(reports, min_size=2, max_size=5), st.integers(1, 9000), st.integers(1, 5000), st.booleans())
def test_warmth_never_repels(those: Sequence[LoadReport], prompt: int, more: int, on_device: bool) -> None:
    ask = Ask(prompt, "s")
    chosen = Marginal().choose(ask, fleet_of(*those), 0.0)
    at = "abcde".index(chosen)
    device, host = those[at].resident["s"]
    warmer = Held(device + more, host) if on_device else Held(device, host + more)
    reports_now = [replace(one, resident={"s": warmer}) if here == at else one for here, one in enumerate(those)]
    assert Marginal().choose(ask, fleet_of(*reports_now), 0.0) == chosen


@given(st.permutations("abcd"), st.lists(reports, min_size=4, max_size=4, unique_by=repr), asks)
def test_the_order_in_which_replicas_are_known_is_irrelevant(
    order: Sequence[str], those: Sequence[LoadReport], ask: Ask
) -> None:
    fleet, of = Fleet(), dict(zip("abcd", those, strict=True))
    for end in range(1, 5):
        fleet.consist_of(order[:end])
    for name in order:
        fleet.heard(name, of[name], 0.0)
    for name, router in ROUTERS.items():
        assert router().choose(ask, fleet, 0.0) == router().choose(ask, fleet_of(*those), 0.0), name


# --- reports ----------------------------------------------------------------------------------------------------------


def test_a_report_that_comes_late_or_twice_is_left_out() -> None:
    fleet = fleet_of(replace(IDLE, number=5, running=5))
    assert not fleet.heard("a", replace(IDLE, number=5), 1.0)
    assert not fleet.heard("a", replace(IDLE, number=4), 1.0)
    assert fleet.replicas["a"].heard_s == 0.0
    assert fleet.heard("a", replace(IDLE, number=0, started="again"), 1.0)
    assert not fleet.heard("nobody", IDLE, 1.0)


def test_a_replica_whose_reports_are_stale_is_out_and_all_are_in_where_all_are_stale() -> None:
    fleet = fleet_of(IDLE, IDLE)
    fleet.heard("b", replace(IDLE, number=2), 4.0)
    assert [one.name for one in fleet.rotation(5.0)] == ["a", "b"]
    assert [one.name for one in fleet.rotation(5.1)] == ["b"]
    assert [one.name for one in fleet.rotation(99.0)] == ["a", "b"]


def test_a_dead_engine_fails_at_most_three_requests_until_it_reports_again() -> None:
    """It answers at once, so that it has the fewest requests of all."""
    fleet, failed, now = fleet_of(replace(IDLE, running=9), IDLE, now=0.0, stale_s=60.0), 0, 0.0
    for _ in range(40):
        now += 0.25
        fleet.heard("a", replace(IDLE, number=int(now * 4) + 1, running=9), now)
        name = Least().choose(Ask(10), fleet, now)
        fleet.sent(name, Ask(10), now)
        failed += name == "b"
        fleet.ended(name)
        fleet.failed("b", failed, now)
    assert failed == 3
    assert fleet.is_out(fleet.replicas["b"], now)
    fleet.heard("b", replace(IDLE, number=2), now)
    assert not fleet.is_out(fleet.replicas["b"], now)


def test_who_fails_again_is_out_for_twice_as_long() -> None:
    fleet, out_s, now = fleet_of(IDLE, stale_s=60.0), [], 0.0
    replica, number, failures = fleet.replicas["a"], 1, 0
    for _ in range(3):
        while not fleet.is_out(replica, now):
            failures += 1
            fleet.failed("a", failures, now)
        began = now
        while fleet.is_out(replica, now):
            now, number = now + 0.125, number + 1
            fleet.heard("a", replace(IDLE, number=number), now)
        out_s.append(now - began)
    assert out_s == [1.0, 2.0, 4.0]
    assert failures == 5, "three the first time, one each time it comes back"
    fleet.failed("a", 0, now)
    assert (replica.failures, replica.times_out) == (0, 0)


def test_without_reports_a_conversation_stays_and_others_are_spread_and_it_is_counted() -> None:
    fleet = fleet_of(None, None)
    first = Marginal().choose(Ask(10, "s"), fleet, 0.0)
    fleet.sent(first, Ask(10, "s"), 0.0)
    assert Marginal().choose(Ask(10, "s"), fleet, 1.0) == first
    assert Marginal().choose(Ask(10, "t"), fleet, 1.0) != first
    assert fleet.blind == 3


def test_a_router_that_was_started_anew_learns_homes_from_what_is_resident() -> None:
    fleet = fleet_of(IDLE, replace(IDLE, resident={"s": Held(0, 500), "gone": Held(0, 0)}))
    assert dict(fleet.homes) == {"s": "b"}
    fleet.heard("a", replace(IDLE, number=2, resident={"t": Held(9)}), 1.0)
    assert "t" not in fleet.homes, "it knows where it sent what since"


def test_the_oldest_homes_are_forgotten() -> None:
    fleet = fleet_of(IDLE, most_homes=2)
    for session in ("x", "y", "x", "z"):
        fleet.sent("a", Ask(1, session), 0.0)
    assert [*fleet.homes] == ["x", "z"]


@given(st.lists(st.tuples(st.sampled_from(["sent", "heard", "ended", "failed", "leaves"]), st.sampled_from("abc"),
                          st.integers(0, 30)), max_size=60))  # fmt: skip
def test_books_are_right_whatever_gets_lost(events: Sequence[tuple[str, str, int]]) -> None:
    fleet = fleet_of(None, None, None)
    for at, (what, name, number) in enumerate(events):
        now = at / 10
        if what == "leaves":
            fleet.consist_of(set(fleet.replicas) ^ {name} or {"a"})
        elif what == "heard":
            fleet.heard(name, replace(IDLE, number=number), now)
        elif what == "sent" and name in fleet.replicas:
            fleet.sent(name, Ask(number + 1, str(number)), now)
        elif what == "failed":
            fleet.failed(name, number % 5, now)
        else:
            fleet.ended(name)
        for replica in fleet.replicas.values():
            assert replica.sent_prefill_tokens == sum(one.prefill_tokens for one in replica.sent)
            assert replica.sent_context_tokens == sum(one.prompt_tokens for one in replica.sent)
            assert replica.in_flight >= 0
        assert Marginal().choose(Ask(5, "3"), fleet, now) in fleet.replicas


# --- the report itself ------------------------------------------------------------------------------------------------


def test_a_report_is_read_as_it_was_written() -> None:
    report = replace(IDLE, resident={session_key("me"): Held(5, 7)})
    assert LoadReport.parse(report.as_dict()) == report
    assert "me" not in report.resident


@pytest.mark.parametrize(("field", "value"), [("running", -1), ("seats", 0), ("step_age_s", float("nan"))])
def test_a_report_out_of_range_is_refused_by_its_field(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        LoadReport.parse({**IDLE.as_dict(), field: value})


@pytest.mark.parametrize(("fields", "said"), [({"stale_s": 0}, "stale_s=0: must be greater"),
                                              ({"lag_s": -1}, "lag_s=-1: must be at least 0")])  # fmt: skip
def test_a_fleet_that_cannot_be_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Fleet(**fields)
