"""The replay in another order: worked by hand, and equal to the server where the order is the same."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from vllm_ext.scheduling.shadow.virtual_queue import VirtualQueue, VirtualRequest


class Sorted:
    """Requests that wait, by a key."""

    def __init__(self, key: Callable[[VirtualRequest], float]) -> None:
        self.key, self.waiting = key, list[VirtualRequest]()

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, request: VirtualRequest, now: float) -> None:
        self.waiting.append(request)

    def remove(self, request: VirtualRequest) -> None:
        if request in self.waiting:
            self.waiting.remove(request)

    def first(self, now: float) -> VirtualRequest:
        return min(self.waiting, key=self.key)

    def pop(self) -> VirtualRequest:
        found = self.first(0.0)
        self.waiting.remove(found)
        return found


def by_arrival(request: VirtualRequest) -> float:
    return request.arrived


def by_bound(request: VirtualRequest) -> float:
    return request.max_tokens


class Server:
    """A server with some seats and KV memory that serves by arrival: a second for each of a request's tokens."""

    def __init__(self, key: Callable[[VirtualRequest], float], *, seats: int = 1, kv_tokens: float = math.inf) -> None:
        self.order, self.judged = Sorted(key), list[VirtualRequest]()
        self.queue = VirtualQueue(self.order, self.judged.append, seats)
        self.seats, self.kv_tokens = seats, kv_tokens
        self.waiting, self.running = list[VirtualRequest](), list[VirtualRequest]()

    def serve(self, requests: list[VirtualRequest], *, until: int = 10_000, most: float = math.inf) -> None:
        for now in range(until):
            for request in [r for r in self.running if r.started is not None and now - r.started >= r.max_tokens]:
                self.running.remove(request)
                self.queue.left(request, now, aborted=False)
            for request in [r for r in requests if r.arrived == now]:
                self.waiting.append(request)
                self.queue.arrived(request)
            while self.waiting and self.fits(self.waiting[0]):
                self.running.append(self.waiting.pop(0))
                self.queue.started(self.running[-1], now)
            self.queue.stepped(now, seats_taken=len(self.running) == self.seats)
            self.queue.advance(most)
            if not self.waiting and not self.running and now > max(r.arrived for r in requests):
                return

    def fits(self, request: VirtualRequest) -> bool:
        used = sum(r.kv_tokens for r in self.running)
        return len(self.running) < self.seats and used + request.kv_tokens <= self.kv_tokens

    @property
    def begins(self) -> dict[str, float | None]:
        return {r.request_id: r.begins for r in self.judged}


def request(name: str, arrived: float, tokens: int, kv_tokens: int = 0) -> VirtualRequest:
    return VirtualRequest(
        request_id=name, num_prompt_tokens=1, max_tokens=tokens, priority=0, arrived=arrived, kv_tokens=kv_tokens
    )


def drawn(seed: int, count: int = 200) -> list[VirtualRequest]:
    rng = random.Random(seed)
    arrivals = sorted(rng.sample(range(4 * count), count))
    return [request(f"r{at}", at, rng.randint(1, 25), rng.randint(1, 9)) for at in arrivals]


def test_the_shortest_goes_first_and_gives_its_seat_back_sooner() -> None:
    server = Server(by_bound)
    server.serve([request("a", 0, 4), request("long", 1, 10), request("short", 2, 2)])
    assert server.begins == {"a": 0, "short": 4, "long": 6}
    assert [r.started for r in server.judged if r.request_id == "short"] == [14]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("seats", "kv_tokens"), [(1, math.inf), (4, math.inf), (64, 24.0)], ids=["1", "4", "memory"])
def test_in_the_same_order_everybody_starts_when_the_server_starts_it(seed: int, seats: int, kv_tokens: float) -> None:
    requests = drawn(seed)
    server = Server(by_arrival, seats=seats, kv_tokens=kv_tokens)
    server.serve(requests)
    assert len(server.judged) == len(requests)
    assert any(r.started != r.arrived for r in requests)
    assert [r.begins for r in requests] == [r.started for r in requests]


@pytest.mark.parametrize("seed", range(5))
def test_with_seats_bound_the_replay_is_what_a_server_of_that_order_does(seed: int) -> None:
    requests, waiting, running, free = drawn(seed), list[VirtualRequest](), list[tuple[float, str]](), 4
    server = Server(by_bound, seats=4)
    server.serve(requests)
    expected: dict[str, float | None] = {}
    for now in range(10_000):
        free += sum(end == now for end, _ in running)
        waiting += [r for r in requests if r.arrived == now]
        while waiting and free:
            best = min(waiting, key=by_bound)
            waiting.remove(best)
            expected[best.request_id] = now
            running.append((now + best.max_tokens, best.request_id))
            free -= 1
    close = [abs((r.begins or 0.0) - (expected[r.request_id] or 0.0)) for r in requests]
    assert len(server.judged) == len(requests)
    assert sum(c == 0 for c in close) > 0.6 * len(close)
    total, real = sum(r.begins or 0 for r in requests), sum(e or 0 for e in expected.values())
    arrived = sum(r.arrived for r in requests)
    assert total - arrived == pytest.approx(real - arrived, rel=0.1)


def test_a_replay_that_takes_few_events_at_a_time_finds_the_same() -> None:
    at_once, in_turn = Server(by_bound, seats=3), Server(by_bound, seats=3)
    at_once.serve(drawn(7))
    in_turn.serve(drawn(7), most=2)
    in_turn.queue.advance()
    assert in_turn.begins == at_once.begins


def test_who_is_aborted_waits_no_longer_and_holds_nobody_up() -> None:
    server, gone = Server(by_bound), request("gone", 1, 9)
    server.serve([request("a", 0, 4), gone], until=3)
    server.waiting.remove(gone)
    gone.counts = False
    server.queue.left(gone, 3.0, aborted=True)
    server.serve([request("late", 3, 1)])
    server.queue.advance()
    assert server.begins == {"a": 0, "late": 4}
    assert (len(server.order), len(server.queue)) == (0, 0)


def test_memory_is_that_of_who_waits_and_runs() -> None:
    """A day of requests leaves nothing behind."""
    server = Server(by_bound, seats=3)
    server.serve(drawn(3, count=600))
    server.queue.advance()
    queue = server.queue
    assert (len(queue), len(server.order)) == (0, 0)
    assert len(queue._ends) + len(queue._ahead) + len(queue._leads) <= 3
