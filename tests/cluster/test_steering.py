"""From what Ray Serve knows to what policies are asked, and back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ext.cluster.health import AGE, FAILED, ILL, REPORT
from vllm_ext.routing.fleet import Ask
from vllm_ext.scheduling.load_report.report import LoadReport, session_key

pytest.importorskip("ray", reason="the extra ray is not installed")

from vllm_ext.cluster.steering import Steering, ask_of

PRICES = {"base_s": 0.01, "prefill_token_s": 1e-4, "decode_s": 1e-4, "context_token_s": 1e-7}


def report(number: int = 1, **fields: Any) -> dict[str, Any]:
    told = {
        "number": number, "running": 0, "waiting": 0, "seats": 64, "prefill_tokens": 0, "context_tokens": 0,
        "pool_tokens": 100_000, "prices": PRICES,
    }  # fmt: skip
    return {REPORT: told | fields}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def steering(policy: str = "marginal") -> tuple[Steering, Clock]:
    clock = Clock()
    return Steering(policy, clock=clock), clock


def body(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


def test_the_least_burdened_is_asked_first_and_all_others_after_it() -> None:
    found, _ = steering()
    found.update({"a": report(prefill_tokens=50_000, running=9), "b": report(), "c": report(running=3)})
    assert found.ranked({"a": 0, "b": 0, "c": 0}, "", body(prompt="hello")) == ["b", "c", "a"]


def test_a_conversation_stays_by_header_or_body_and_the_body_wins() -> None:
    found, _ = steering("home")
    found.update({name: report() for name in "abc"})
    everybody = dict.fromkeys("abc")
    (home, *_) = found.ranked(everybody, "talk", None)
    assert found.ranked(everybody, "talk", body(prompt="x" * 4000))[0] == home
    assert found.ranked(everybody, "else", body(prompt="x", vllm_xargs={"conversation_id": "talk"}))[0] == home
    assert found.ranked(everybody, "else", None)[0] != home


def test_who_says_it_is_ill_gets_nothing_until_it_reports_again() -> None:
    found, clock = steering("round-robin")
    everybody = dict.fromkeys("ab")
    found.update({"a": report(), "b": report()})
    found.update({"a": {ILL: "the engine is dead"}, "b": report(2)})
    assert {found.ranked(everybody, "", None)[0] for _ in range(6)} == {"b"}
    clock.now = 2.5
    found.update({"a": report(2), "b": report(3)})
    assert {found.ranked(everybody, "", None)[0] for _ in range(6)} == {"a", "b"}


def test_who_has_died_gets_nothing() -> None:
    found, _ = steering("round-robin")
    found.update({"a": report(), "b": report()})
    found.died("a")
    found.died("nobody")
    assert {found.ranked(dict.fromkeys("ab"), "", None)[0] for _ in range(4)} == {"b"}


def test_without_reports_requests_go_round_and_that_is_counted() -> None:
    found, _ = steering()
    found.update({"a": {}, "b": {}})
    chosen = [found.ranked(dict.fromkeys("ab"), "", None)[0] for _ in range(4)]
    assert sorted(chosen) == ["a", "a", "b", "b"]
    assert found.fleet.blind == 4


def test_where_reports_have_stopped_requests_go_round_and_that_is_counted_and_nothing_is_kept() -> None:
    found, clock = steering()
    found.update({"a": report(), "b": report(running=60, prefill_tokens=10_000)})
    clock.now = 10.0
    chosen = []
    for _ in range(400):
        clock.now += 0.05
        chosen.append(found.ranked(dict.fromkeys("ab"), "", None)[0])
    assert 150 < chosen.count("a") < 350
    assert found.fleet.blind == 400
    assert sum(len(one.sent) for one in found.fleet.replicas.values()) <= 102


def test_a_new_replica_without_reports_is_not_flooded() -> None:
    found, clock = steering()
    found.update({"a": {}})
    for _ in range(1000):
        clock.now += 0.05
        found.ranked({"a": 0}, "", None)
    found.update({"a": {}, "b": {}})
    chosen = []
    for _ in range(400):
        clock.now += 0.05
        chosen.append(found.ranked({"a": 0, "b": 0}, "", None)[0])
    assert chosen.count("b") < 300


def test_before_ray_has_told_of_anybody_whoever_is_offered_is_asked() -> None:
    found, _ = steering()
    assert found.ranked({"a": 0, "b": 0}, "", None) == ["a", "b"]


def test_a_report_of_another_version_is_as_none() -> None:
    found, _ = steering()
    found.update({"a": {REPORT: {"number": "one"}}, "b": report()})
    assert found.ranked(dict.fromkeys("ab"), "", None)[0] == "b"


def test_a_report_that_comes_again_with_another_s_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = steering()
    read = []
    original = LoadReport.parse
    monkeypatch.setattr(LoadReport, "parse", lambda raw: read.append(raw["number"]) or original(raw))
    found.update({"a": report(1), "b": report(1)})
    found.update({"a": report(2), "b": report(1)})
    assert read == [1, 1, 2]
    found.update({"a": report(1, started="anew"), "b": report(1)})
    assert read == [1, 1, 2, 1]
    assert found.fleet.replicas["a"].report == LoadReport.parse(report(1, started="anew")[REPORT])


def test_ray_may_offer_fewer_than_it_told_of_or_others() -> None:
    found, _ = steering("least")
    found.update({"a": report(), "b": report()})
    assert found.ranked({"b": 0}, "", None) == ["b"]
    assert found.ranked({"new": 0}, "", None) == ["new"]


MESSAGES = [
    {"role": "system", "content": "s" * 2000},
    {
        "role": "user",
        "content": [{"type": "text", "text": "u" * 1200}, {"type": "image_url", "image_url": {"url": "x"}}],
    },
]


@pytest.mark.parametrize(
    ("request_", "tokens"),
    [
        (None, 512),
        (body(prompt="x" * 400), 100),
        (body(prompt=[5] * 77), 77),
        (body(prompt=[[5] * 70, [5] * 30]), 100),
        (body(prompt=["x" * 40, "y" * 40]), 20),
        (body(messages=MESSAGES), 800),
        (body(messages="nonsense"), 2),
        (body(messages=[{"role": "user", "content": None}]), 1),
        (body(prompt=""), 1),
        (body(prompt=[]), 1),
        (body(messages=7), 1),
    ],
)
def test_a_prompt_is_measured_whatever_it_is(request_: Any, tokens: int) -> None:
    assert ask_of("", request_).prompt_tokens == tokens


def test_long_prompts_without_a_name_go_by_how_they_begin() -> None:
    first, next_turn = body(messages=MESSAGES), body(messages=[*MESSAGES, {"role": "user", "content": "more"}])
    assert ask_of("", first).session == ask_of("", next_turn).session is not None
    other = [MESSAGES[0], {"role": "user", "content": "v" * 1200}]
    assert ask_of("", body(messages=other)).session not in (None, ask_of("", first).session)
    assert ask_of("", body(prompt="short")).session is None
    assert ask_of("x" * 300, body(prompt="short")).session is None, "no conversation id, as in the engine"
    assert ask_of("talk", first).session == session_key("talk")
    assert ask_of("talk", body(prompt="x", session_id="y" * 300)).session == session_key("talk")
    assert ask_of("\ud800", body(prompt="x")).session == session_key("\ud800")
    assert ask_of("talk", body(prompt="x", vllm_xargs={"conversation_id": 7})).session == session_key("talk")
    assert ask_of("talk", body(prompt="x", vllm_xargs=None)).session == session_key("talk")
    assert ask_of("talk", body(prompt="x", vllm_xargs="odd", session_id="mine")).session == session_key("mine")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_long_system_prompt_does_not_make_strangers_one_conversation(role: str) -> None:
    shared = {"role": role, "content": "s" * 5000}
    said = [{"role": "user", "content": f"question of client {number}"} for number in range(2)]
    assert [ask_of("", body(messages=[shared, one])).session for one in said] == [None, None]
    answered = [[shared, one, {"role": "assistant", "content": "a" * 1024}] for one in said]
    mine, other = (ask_of("", body(messages=[*turns, said[0]])).session for turns in answered)
    assert mine is not None
    assert other not in (None, mine)
    assert ask_of("", body(messages=[*answered[0], said[0], answered[0][-1]])).session == mine


@pytest.mark.parametrize(
    "request_",
    [
        body(messages=[{}] * 300_000 + [{"role": "user", "content": "late"}]),
        body(messages=[{"role": "user", "content": [[0] * 300_000, {"type": "text", "text": "late"}]}]),
        body(prompt=[{}] * 300_000),
        body(messages=[[[]] * 50_000] * 5),
    ],
    ids=["messages", "parts", "prompts", "lists"],
)
def test_of_a_body_of_many_parts_only_some_are_looked_at(request_: Any) -> None:
    """Whoever is without a key may send it, and meanwhile nobody is routed: it is not looked at to its end."""
    assert ask_of("", request_) == Ask(1)


def test_how_old_a_report_is_decides_what_it_can_have() -> None:
    found, clock = steering("least")
    found.update({"a": report()})
    for _ in range(3):
        found.ranked(["a"], "", None)
        clock.now += 1.0
    found.update({"a": {**report(2), AGE: 1.6}})
    assert [one.at_s for one in found.fleet.replicas["a"].sent] == [clock.now - 1.0]


def test_a_replica_whose_requests_fail_is_left_out_until_it_has_rested() -> None:
    """Its engine goes on to report, as one with nothing to do."""
    found, clock = steering("least")
    for number, failed in enumerate((0, 2, 3), 1):
        clock.now += 0.5
        found.update({"a": {**report(number, running=5), FAILED: 0}, "b": {**report(number), FAILED: failed}})
        assert found.ranked(["a", "b"], "", None)[0] == ("b" if failed < 3 else "a")
    clock.now += 1.5
    found.update({"a": {**report(4, running=5)}, "b": {**report(4), FAILED: 3}})
    assert found.ranked(["a", "b"], "", None)[0] == "b"


def test_that_a_replica_is_ill_is_said_once_though_its_last_report_is_told_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found, _ = steering("least")
    found.update({"a": report(), "b": report()})
    for _ in range(3):
        found.died("a")
        found.update({"a": report(), "b": report()})
    assert caplog.text.count("nothing is sent to replica a") == 1
