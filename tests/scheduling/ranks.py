"""A ranked queue over requests whose ranks a test sets by name."""

from __future__ import annotations

import math

from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from vllm_ext.contract import Rank
from vllm_ext.scheduling.waiting_table import WaitingTable
from vllm_ext.simulation.engine.harness import make_request


class Ranks:
    """A queue over requests whose ranks a test sets by name."""

    def __init__(self) -> None:
        self.ranks: dict[str, Rank] = {}
        self.asked: list[str] = []
        self.requests: dict[str, Request] = {}
        self.queue = WaitingTable(self._rank, self._ties)

    def _rank(self, request: Request) -> Rank:
        self.asked.append(request.request_id)
        return self.ranks[request.request_id]

    def _ties(self, request: Request) -> tuple[float, int]:
        return (request.arrival_time, list(self.requests).index(request.request_id))

    def make(
        self,
        name: str,
        key: float = 0.0,
        *,
        until: float = math.inf,
        level: int = 0,
        arrival: float = 0.0,
        adapter: int = 0,
    ) -> Request:
        self.requests[name] = make_request(name, 3, arrival_time=arrival)
        if adapter:
            self.requests[name].lora_request = LoRARequest(f"adapter-{adapter}", adapter, "somewhere")
        self.ranks[name] = Rank((key,), until_s=until, level=level)
        return self.requests[name]

    def add(self, name: str, key: float = 0.0, **kwargs: float) -> Request:
        request = self.make(name, key, **kwargs)  # type: ignore[arg-type]
        self.queue.add_request(request)
        return request

    def names(self) -> list[str]:
        return [request.request_id for request in self.queue]

    def drain(self) -> list[str]:
        names = []
        while self.queue:
            first = self.queue.peek_request()
            assert self.queue.pop_request() is first
            names.append(first.request_id)
        return names
