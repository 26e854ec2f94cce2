"""One cell of `multi_turn.py`: a fresh engine, one row, conversations that react to it; run as a child process.

Method: start `AsyncLLM` in this process (its engine core and worker are processes of their own), serve the warm-up
twice, with the device's cache emptied in between, so that copies in both directions have been made once; then, for
each phase, empty all caches and let every client send a turn, wait for the answer, think, and send the next one. No
metric is computed here.

    python benchmarks/multi_turn_cell.py SPEC.json OUT.json        (both written and read by multi_turn.py)
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import engine_cell
import multi_turn_workload as workload
from engine_cpu import CpuClock

from vllm_ext.simulation.requests import SimRequest, Workload
from vllm_ext.simulation.workloads.spec import WorkloadSpec

_IDLE_S = 30.0
_TOKENS = (
    "device_hit_tokens",
    "host_hit_tokens",
    "preempted_tokens",
    "preempted_device_hit_tokens",
    "preempted_host_hit_tokens",
)
"""Of new requests, found on the device and in the host tier; of preempted ones that come again: all, and as above."""
_BYTES = {"host_stored_bytes": "vllm:kv_offload_store_bytes", "host_loaded_bytes": "vllm:kv_offload_load_bytes"}


def main(spec_path: str, out_path: str) -> None:
    """Run the cell described by one JSON file and write what was observed to another."""
    spec = json.loads(Path(spec_path).read_text(encoding="utf-8"))
    os.environ["VLLM_EXT_BENCH_FORCED_LENGTH"] = "1"
    observed = asyncio.run(_run(spec))
    Path(out_path).write_text(json.dumps(observed), encoding="utf-8")


async def _run(spec: dict[str, Any]) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    conversations = {name: workload.load(WorkloadSpec(**phase)) for name, phase in spec["phases"].items()}
    load, copies = engine_cell.load_recorder(), _copy_recorder()
    started = time.monotonic()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**spec["engine_args"]), stat_loggers=[load, copies])
    try:
        start_s = time.monotonic() - started
        warmup = workload.load(WorkloadSpec(**spec["warmup"]))
        await _Clients(engine, warmup).serve()
        await _forget(engine, host=False)
        await _Clients(engine, warmup).serve()
        phases = {}
        for name, found in conversations.items():
            await _forget(engine, host=True)
            load.state.reset()
            copies.state.reset()
            cpu = CpuClock()
            served = await _Clients(engine, found).serve()
            phases[name] = {
                "requests": served,
                "foreign_cpu_cores": cpu.foreign_cores(),
                "load": {**load.state.summary(), **copies.state.counts},
            }
        return {"phases": phases, "engine_start_s": start_s, "settings": engine_cell.settings_of(engine)}
    finally:
        engine.shutdown()


async def _forget(engine: Any, *, host: bool) -> None:
    """Empty the device's prefix cache, and the host tier if asked to; copies still under way are waited for."""
    deadline = time.monotonic() + _IDLE_S
    while not await engine.reset_prefix_cache(reset_connector=host):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the caches could not be emptied within {_IDLE_S:g} s: blocks are still in use")
        await asyncio.sleep(0.05)


class _Clients:
    """Clients of one workload: each sends what its conversation says, when its last answer and thinking allow."""

    def __init__(self, engine: Any, conversations: Workload) -> None:
        self._engine = engine
        self._workload = conversations
        self._said: dict[str, int] = {}
        self._served: list[dict[str, Any]] = []
        self._start = 0.0

    async def serve(self) -> list[dict[str, Any]]:
        """Serve all to the end and return what was seen of each request, in the order of arrival; times in seconds."""
        openings = list(self._workload.start())
        self._start = time.monotonic()
        await asyncio.gather(*(self._converse(opening) for opening in openings))
        return sorted(self._served, key=lambda one: (one["arrival_s"], one["req_id"]))

    async def _converse(self, opening: SimRequest) -> None:
        request: SimRequest | None = opening
        while request is not None:
            await asyncio.sleep(self._start + request.arrival_s - time.monotonic())
            output_ids, finished_s = await self._ask(request)
            request = workload.following(self._workload, request, finished_s, output_ids)

    async def _ask(self, request: SimRequest) -> tuple[list[int], float]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=dict(request.extra_args or {}),
        )
        prompt = TokensPrompt(prompt_token_ids=_prompt_ids(request))
        sent_s = time.monotonic() - self._start
        times_s: list[float] = []
        output_ids: list[int] = []
        reason, cached = None, 0
        async for output in self._engine.generate(prompt, sampling, f"{request.req_id}-{self._start}"):
            completion = output.outputs[0]
            output_ids.extend(completion.token_ids)
            times_s.extend([time.monotonic() - self._start] * len(completion.token_ids))
            reason, cached = completion.finish_reason, output.num_cached_tokens or cached
        session = request.session_id or request.req_id
        self._served.append(
            {
                "req_id": request.req_id,
                "arrival_s": request.arrival_s,
                "sent_s": sent_s,
                "token_times_s": times_s,
                "output_tokens": workload.answer_tokens(request),
                "prompt_tokens": request.prompt_tokens,
                "history_tokens": self._said.get(session, 0),
                "cached_tokens": cached,
                "finish_reason": reason,
            }
        )
        self._said[session] = request.prompt_tokens + len(output_ids)
        return output_ids, time.monotonic() - self._start


def _prompt_ids(request: SimRequest) -> list[int]:
    if request.token_ids is None:
        raise ValueError(f"{request.req_id}: a request without token ids; conversations need at least two turns")
    return list(request.token_ids)


class _Copies:
    """Where prompts found their KV and what was copied, from the statistics of each engine step."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything; counts start now."""
        self.counts = dict.fromkeys((*_TOKENS, *_BYTES), 0.0)

    def observe(self, stats: Any) -> None:
        """Add one engine step."""
        counts, device, host = self.counts, stats.prefix_cache_stats, stats.connector_prefix_cache_stats
        counts["device_hit_tokens"] += device.hits
        counts["preempted_tokens"] += device.preempted_queries
        counts["preempted_device_hit_tokens"] += device.preempted_hits
        if host is not None:
            counts["host_hit_tokens"] += host.hits
            counts["preempted_host_hit_tokens"] += host.preempted_hits
        values = (stats.kv_connector_stats or {}).get("data", {})
        for name, metric in _BYTES.items():
            counts[name] += sum(values.get(metric, {}).values())


def _copy_recorder() -> Any:
    """A stat logger class whose ``state`` can be read back: vLLM builds its stat loggers itself."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class CopyRecorder(StatLoggerBase):
        state = _Copies()

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            if scheduler_stats is not None:
                self.state.observe(scheduler_stats)

        def log_engine_initialized(self) -> None:
            pass

    return CopyRecorder


if __name__ == "__main__":
    main(*sys.argv[1:])
