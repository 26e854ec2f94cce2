"""Who is turned away: by forecasts of engines that are stand-ins, at times of a clock of our own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_ext.config import parse
from vllm_ext.hints import HintError
from vllm_ext.slo import shedding
from vllm_ext.slo.shedding import LONGEST_RETRY_S, Refusal, Shedder

INTERVAL_S = 1.0


class Client:
    """The part of vLLM's engine-core client that the shedder uses."""

    def __init__(self, *queues: dict[str, Any] | None) -> None:
        self.core_engines = [bytes([i]) for i in range(len(queues))]
        self.queues = dict(zip(self.core_engines, queues, strict=True))
        self.asked: list[tuple[str, bytes]] = []
        self.before: Callable[[], Awaitable[None]] | None = None

    async def _call_utility_async(self, method: str, since: int, *, engine: bytes) -> dict[str, Any]:
        self.asked.append((method, engine))
        if self.before is not None:
            await self.before()
        state: dict[str, Any] = {"runtime": {"coefficients": [0.0, 0.0, 0.001, 0.0, 0.0]}}
        if self.queues[engine] is not None:
            state["wait_forecast"] = self.queues[engine]
        return state


class Engine:
    def __init__(self, client: Client) -> None:
        self.engine_core = client


class Tiers:
    """Takes the place of the metrics."""

    def __init__(self) -> None:
        self.refused: list[str] = []

    def tier(self, tag: str | None) -> str:
        return tag or ""

    def shed(self, tier: str) -> None:
        self.refused.append(tier)


class Front:
    def __init__(self, *queues: dict[str, Any] | None, **options: Any) -> None:
        self.client = Client(*queues)
        self.engine = Engine(self.client)
        self.tiers = Tiers()
        self.now = 50.0
        config = parse({"slo": {"shed": True, **options}}).slo
        self.shedder = Shedder(self.engine, config, INTERVAL_S, self.tiers, clock=lambda: self.now)  # type: ignore[arg-type]

    async def fetch(self) -> None:
        await self.shedder.fetch(self.engine)

    def ask(self, ttft_ms: float | None = None, tokens: int = 100, n: int = 1, **extra: Any) -> Refusal | None:
        if ttft_ms is not None:
            extra["ttft_slo_ms"] = ttft_ms
        return self.shedder.refusal(extra or None, tokens, n)


def queue(waiting: int = 9, tokens: int = 900, pace: float | None = 2.0) -> dict[str, Any]:
    """A new request waits (9 + 1) / 2 = 5 s here."""
    return {"waiting": waiting, "tokens": tokens, "starts_per_s": pace}


async def test_a_request_is_refused_where_its_first_token_would_come_too_late() -> None:
    front = Front(queue())
    await front.fetch()
    assert front.ask(5200) is None
    front = Front(queue())
    await front.fetch()
    refused = front.ask(3000, tag="shop")
    assert refused == Refusal(forecast_s=pytest.approx(5.1), objective_s=3.0, retry_after_s=3)
    assert "after 5.1 s" in str(refused)
    assert "3 s" in str(refused)
    assert front.tiers.refused == ["shop"]


async def test_the_margin_allows_more() -> None:
    front = Front(queue(), shed_margin=2.0)
    await front.fetch()
    assert front.ask(3000) is None
    assert front.ask(2000) is not None


async def test_defaults_and_buckets_count_as_objectives() -> None:
    front = Front(queue(), ttft_bucket_ms=[1000, 60_000])
    await front.fetch()
    assert front.ask(tokens=100) is not None
    assert front.ask(tokens=600) is None


@pytest.mark.parametrize(
    "state",
    [queue(waiting=0, tokens=0), queue(waiting=0, pace=0.001), queue(pace=None, tokens=9), None],
    ids=["empty", "empty after a slow time", "pace unknown and short prompts", "scheduler without a forecast"],
)
async def test_doubts_are_decided_for_the_client(state: dict[str, Any] | None) -> None:
    front = Front(state)
    assert front.ask(1000) is None, "nothing was fetched yet"
    await front.fetch()
    assert front.ask(1000, tokens=10) is None
    assert front.tiers.refused == []


async def test_an_empty_queue_sheds_nobody_whatever_the_objective() -> None:
    front = Front(queue(waiting=0, tokens=0))
    await front.fetch()
    for _ in range(100):
        assert front.ask(0.001, tokens=100_000) is None


async def test_requests_without_a_ttft_objective_are_never_refused() -> None:
    front = Front(queue(waiting=10**6))
    await front.fetch()
    assert front.ask() is None
    assert front.ask(jct_slo_ms=1, tbt_slo_ms=1) is None


async def test_what_was_let_pass_since_the_last_look_counts() -> None:
    front = Front(queue())
    await front.fetch()
    assert front.ask(5200) is None
    assert front.ask(5200) is not None
    assert front.ask(6200, n=4) is None, "refused ones do not count"
    assert front.ask(7200) is not None
    await front.fetch()
    assert front.ask(5200) is None, "the new state has them in it"


async def test_what_is_sent_while_the_state_is_on_its_way_counts() -> None:
    front = Front(queue())

    async def send() -> None:
        assert front.ask(n=4) is None

    front.client.before = send
    await front.fetch()
    assert front.ask(5200) is not None


async def test_the_queue_is_taken_to_move_on_at_its_pace() -> None:
    front = Front(queue())
    await front.fetch()
    assert front.ask(4300) is not None
    front.now += INTERVAL_S
    assert front.ask(4300) is None


async def test_an_old_state_says_nothing() -> None:
    front = Front(queue(waiting=10**6))
    await front.fetch()
    front.now += 4 * INTERVAL_S
    assert front.ask(1) is not None
    front.now += 4 * INTERVAL_S
    assert front.ask(1) is None


async def test_of_several_engines_the_best_one_counts() -> None:
    front = Front(queue(waiting=99), queue(), queue(waiting=199))
    await front.fetch()
    refused = front.ask(1000)
    assert refused is not None
    assert refused.forecast_s == pytest.approx(5.1)
    front = Front(queue(waiting=99), queue(waiting=0))
    await front.fetch()
    assert front.ask(1000) is None


async def test_engines_that_are_gone_are_forgotten() -> None:
    front = Front(queue(waiting=99), queue(waiting=0))
    await front.fetch()
    front.client.core_engines = front.client.core_engines[:1]
    await front.fetch()
    assert front.ask(1000) is not None


@pytest.mark.parametrize(("waiting", "expected_s"), [(9, 5), (1, 1), (10**6, LONGEST_RETRY_S)])
async def test_the_client_is_told_when_it_would_be_let_pass(waiting: int, expected_s: int) -> None:
    front = Front(queue(waiting=waiting, tokens=0))
    await front.fetch()
    refused = front.ask(700, tokens=0)
    assert refused is not None
    assert refused.retry_after_s == expected_s


async def test_a_malformed_hint_is_named() -> None:
    with pytest.raises(HintError, match="ttft_slo_ms"):
        Front(queue()).ask(-1)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def test_polling_starts_with_a_request_and_ends_when_none_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front(queue(waiting=10**6))
    monkeypatch.setattr(front.shedder, "_interval_s", 0.001)
    assert front.client.asked == []
    assert front.ask(1) is None
    await until(lambda: len(front.client.asked) >= 3)
    assert front.ask(1) is not None
    assert {method for method, _ in front.client.asked} == {"vllm_ext_state"}
    front.now += 31
    poller = front.shedder._poller
    assert poller is not None
    await asyncio.wait_for(poller, 30)
    assert front.ask(1) is None, "what was known is forgotten, and asked for again"
    await until(lambda: front.ask(1) is not None)
    assert front.shedder._poller is not poller
    front.shedder._poller.cancel()  # type: ignore[union-attr]


async def test_a_failure_is_logged_once_and_lets_everybody_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(shedding.logger, "exception", lambda text, *_: logged.append(text))
    front = Front(queue(waiting=10**6))
    monkeypatch.setattr(front.shedder, "_interval_s", 0.001)
    await front.fetch()

    async def fail() -> None:
        raise ValueError("not today")

    front.client.before = fail
    assert front.ask() is None
    await until(lambda: len(front.client.asked) >= 4)
    assert front.ask(1) is None
    assert len(logged) == 1
    front.shedder._poller.cancel()  # type: ignore[union-attr]


@pytest.mark.parametrize("end", ["dead", "collected"])
async def test_polling_ends_with_its_engine(end: str) -> None:
    front = Front(queue())

    async def die() -> None:
        raise EngineDeadError()

    if end == "dead":
        front.client.before = die
    front.ask()
    poller = front.shedder._poller
    assert poller is not None
    if end == "collected":
        del front.engine
    await asyncio.wait_for(poller, 10)
    assert len(front.client.asked) == (end == "dead")
