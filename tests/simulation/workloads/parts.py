"""Workloads of a few fields, files to read them from, and a server for them."""

from __future__ import annotations

import heapq
import itertools
import json
from pathlib import Path
from typing import Any

from vllm_ext.simulation.workloads.build import GeneratedWorkload, build
from vllm_ext.simulation.workloads.requests import SimRequest, Workload
from vllm_ext.simulation.workloads.spec import WorkloadSpec


def workload(**fields: Any) -> GeneratedWorkload:
    source = {} if "mix" in fields else {"source": "fixed:10:20"}
    return build(WorkloadSpec.model_validate(source | fields))


def requests(**fields: Any) -> list[SimRequest]:
    return list(workload(**fields).start())


def lengths(**fields: Any) -> list[tuple[int, int]]:
    return [(r.prompt_tokens, r.output_tokens) for r in requests(**fields)]


def jsonl(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def counts(folder: Path, *pairs: tuple[int, int]) -> str:
    return jsonl(folder, *({"prompt_tokens": p, "output_tokens": o} for p, o in pairs))


def serve(load: Workload, latency_s: float = 2.0) -> list[SimRequest]:
    """A server that answers each request after the same time; returns the requests by arrival."""
    order = itertools.count()
    waiting = [(r.arrival_s, next(order), r) for r in load.start()]
    served = []
    while waiting:
        request = heapq.heappop(waiting)[-1]
        served.append(request)
        for later in load.after(request, request.arrival_s + latency_s, [7] * request.output_tokens):
            heapq.heappush(waiting, (later.arrival_s, next(order), later))
    return served
