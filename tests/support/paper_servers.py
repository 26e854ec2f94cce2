"""Servers that exist on paper: one queue, whose service takes what its name or flags say, and a little chance."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vllm_ext.compare.servers import Row, Server
from vllm_ext.demo.server import ServerError
from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.requests import all_requests
from vllm_ext.simulation.workloads.spec import WorkloadSpec

SERVICE_S = 0.1


class Paper:
    """A backend of them; counts what was asked of it."""

    def __init__(self, slower: Mapping[str, float] | None = None, noise: float = 0.01) -> None:
        self.slower = dict(slower or {})
        self.noise = noise
        self.starts: list[str] = []
        self.served: list[tuple[str, WorkloadSpec]] = []
        self.told: list[tuple[str, WorkloadSpec]] = []
        self.dies: set[str] = set()
        self.refuses: dict[str, int] = {}
        """Server -> of how many requests one fails."""
        self.has_metrics = True
        self.waiting = [0, 2]
        self.up = 0

    @contextlib.contextmanager
    def started(self, row: Row) -> Iterator[Server]:
        self.starts.append(row.name)
        self.up += 1
        assert self.up == 1, "one at a time"
        try:
            yield _Server(self, row)
        finally:
            self.up -= 1


class _Server:
    max_model_len = 2048

    def __init__(self, backend: Paper, row: Row) -> None:
        self.backend, self.row = backend, row

    def serve(self, workload: WorkloadSpec) -> dict[str, Any]:
        flags = " ".join(self.row.flags)
        if self.backend.dies & {self.row.name, flags}:
            raise ServerError("it ended\nits last lines")
        self.backend.served.append((self.row.name, workload))
        self.backend.told.append((flags, workload))
        requests = all_requests(build(workload))
        chance = np.random.default_rng([workload.seed, *self.row.name.encode()])
        drift = chance.lognormal(0.0, self.backend.noise)  # of this run: another process, another place in memory
        mean = SERVICE_S * self.backend.slower.get(self.row.name, self.backend.slower.get(flags, 1.0)) * drift
        free, ends = 0.0, [0.0] * len(requests)
        noises = chance.lognormal(0.0, self.backend.noise, len(requests))
        for at in sorted(range(len(requests)), key=lambda at: requests[at].arrival_s):
            free = max(free, requests[at].arrival_s) + mean * noises[at]
            ends[at] = free - requests[at].arrival_s
        watched = {
            "at_s": [0.0, 1.0],
            "running": [1, 1],
            "waiting": self.backend.waiting,
            "kv_used": [0.1, 0.4],
            "preemptions": 3,
        }
        every = self.backend.refuses.get(self.row.name, 0)
        return {
            "ttfts": [end - mean / 2 for end in ends], "latencies": ends, "itls": [[mean / 2]] * len(ends),
            "output_lens": [max(2, one.output_tokens) for one in requests],
            "input_lens": [one.prompt_tokens for one in requests], "queue_times": [0.0] * len(ends),
            "errors": ["busy" * (every > 0 and at % every == 0) for at in range(len(ends))],
            **({"timeline": watched} if self.backend.has_metrics else {}),
        }  # fmt: skip
