"""One cell of a benchmark on the real engine: a fresh engine, one system, what it is to serve; run as a child process.

Method: start `AsyncLLM` in this process (its engine core and worker are processes of their own, as in `vllm serve`
without the HTTP layer) and serve one phase after the other: requests at their arrival times, all at once or one by one,
or conversations whose clients wait for an answer, think, and send the next turn. It is noted when each token is
received. No metric is computed here.

    python benchmarks/engine/engine_cell.py SPEC.json OUT.json        (both written and read by `engine_process.serve`)
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_ext.report.foreign_cpu import ForeignCpu
from vllm_ext.simulation.workloads.requests import SimRequest, Workload

_PREDICTOR_START_S, _IDLE_S = 180.0, 30.0
COPIED = {"host_stored_bytes": "vllm:kv_offload_store_bytes", "host_loaded_bytes": "vllm:kv_offload_load_bytes"}
FOUND = (
    "device_hit_tokens",
    "host_hit_tokens",
    "preempted_tokens",
    "preempted_device_hit_tokens",
    "preempted_host_hit_tokens",
)
"""Of new requests, found on the device and in the host tier; of preempted ones that come again: all, and as above."""


def main(spec_path: str, out_path: str) -> None:
    """Run the cell described by one JSON file and write what was observed to another."""
    spec = json.loads(Path(spec_path).read_text(encoding="utf-8"))
    os.environ["VLLM_EXT_BENCH_FORCED_LENGTH"] = "1"
    if spec.get("record_steps"):
        os.environ["VLLM_EXT_BENCH_STEP_RECORD"] = "1"
    observed = asyncio.run(_run(spec))
    Path(out_path).write_text(json.dumps(observed), encoding="utf-8")


async def _run(spec: Mapping[str, Any]) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_ext.simulation.recorded import recorder

    logger = step_stats_logger()
    started = time.monotonic()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**spec["engine_args"]), stat_loggers=[logger])
    try:
        observed = {"engine_start_s": time.monotonic() - started, "settings": settings_of(engine), "phases": {}}
        for phase in spec["phases"]:
            observed["phases"][phase["name"]] = await _phase(engine, logger.state, phase)
            if phase.get("wait_for_predictor"):
                await predictor_ready(engine)
        record = await recorder.fetch(engine) if spec.get("record_steps") else None
        return {**observed, "record": record, "predictor": _predictor_outcomes()}
    finally:
        engine.shutdown()


async def _phase(engine: Any, stats: StepStats, phase: Mapping[str, Any]) -> dict[str, Any]:
    """Serve a phase; times count from its start, of requests that come one by one from that of each."""
    if (forget := phase.get("forget")) is not None:
        await _forget(engine, host=forget == "all")
    before = await _counters(engine)
    stats.reset()
    cpu = ForeignCpu()
    start_s = time.monotonic()
    if "workload" in phase:
        served = await converse(engine, _workload(phase["workload"]))
    else:
        together = [[one] for one in phase["requests"]] if phase.get("one_by_one") else [phase["requests"]]
        served = [one for requests in together for one in await serve(engine, phase["name"], requests)]
    return {
        "requests": served,
        "client_start_s": start_s,
        "foreign_cpu_cores": cpu.cores(),
        "load": {**stats.summary(), **since(before, await _counters(engine))},
        "copies": stats.copies,
    }


def _workload(description: Mapping[str, Any]) -> Workload:
    from vllm_ext.simulation.workloads.build import build
    from vllm_ext.simulation.workloads.spec import WorkloadSpec

    return build(WorkloadSpec(**description))


async def _forget(engine: Any, *, host: bool) -> None:
    """Empty the device's prefix cache, and the host tier if asked to; copies still under way are waited for."""
    deadline = time.monotonic() + _IDLE_S
    while not await engine.reset_prefix_cache(reset_connector=host):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the caches could not be emptied within {_IDLE_S:g} s: blocks are still in use")
        await asyncio.sleep(0.05)


def _predictor_outcomes() -> dict[str, float]:
    """What became of the predictions of this process's requests, warm-up and history included."""
    from prometheus_client import REGISTRY

    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    return {
        f"length_predictions_{sample.labels['outcome'].replace('-', '_')}": sample.value
        for sample in samples
        if sample.name == "vllm_ext:length_predictions_total"
    }


async def predictor_ready(engine: Any) -> None:
    """Wait until the length predictor has loaded its model, which the first request started."""
    from vllm_ext.predictor.attach import attached

    found = attached(engine.output_processor)
    if found is None:
        raise RuntimeError("no length predictor is attached to the engine")
    deadline = time.monotonic() + _PREDICTOR_START_S
    while not found.service.ready:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the length predictor was not ready after {_PREDICTOR_START_S:g} s")
        await asyncio.sleep(0.1)


async def _counters(engine: Any) -> dict[str, float]:
    """Totals of our scheduler; none of upstream's."""
    from vllm_ext.metrics.frontend import UTILITY

    if engine.vllm_config.scheduler_config.scheduler_cls is None:
        return {}
    state = await engine.engine_core.call_utility_async(UTILITY, 1 << 60)  # no records of requests
    found = {name: float(state[name]) for name in ("policy_s", "policy_steps", "fallbacks", "stalls")}
    return found | {f"preemptions_{reason}": float(count) for reason, count in state["preemptions"].items()}


def since(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Return what our scheduler counted meanwhile: preemptions by reason, failures, time of policies per step."""
    spent = {name: value - before.get(name, 0.0) for name, value in now.items()}
    policy_s, policy_steps = spent.pop("policy_s", 0.0), spent.pop("policy_steps", 0.0)
    if policy_steps:
        spent["policy_us_per_step"] = policy_s / policy_steps * 1e6
    return spent


async def serve(engine: Any, label: str, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Serve requests at their ``arrival_s``; times count from the start."""
    start_s = time.monotonic()
    asked = [_ask(engine, f"{label}-{start_s}-{i}", one, start_s) for i, one in enumerate(requests)]
    return [served for served, _ in await asyncio.gather(*asked)]


async def converse(engine: Any, workload: Workload) -> list[dict[str, Any]]:
    """Serve conversations to their ends, and return what was seen of each request, in the order of arrival."""
    start_s, found = time.monotonic(), []

    async def client(opening: SimRequest) -> None:
        request: SimRequest | None = opening
        history = 0
        while request is not None:
            served, output_ids = await _ask(engine, f"{request.req_id}-{start_s}", _sent(request), start_s)
            found.append({**served, "req_id": request.req_id, "history_tokens": history})
            history = request.prompt_tokens + len(output_ids)
            finished_s = time.monotonic() - start_s
            request = next(iter(workload.after(request, finished_s, output_ids)), None)

    await asyncio.gather(*(client(opening) for opening in workload.start()))
    return sorted(found, key=lambda one: (one["arrival_s"], one["req_id"]))


def _sent(request: SimRequest) -> dict[str, Any]:
    if request.token_ids is None:
        raise ValueError(f"{request.req_id}: a request without token ids; conversations need at least two turns")
    return {
        "arrival_s": request.arrival_s,
        "prompt_token_ids": list(request.token_ids),
        "output_tokens": min(request.output_tokens, request.max_tokens),
        "max_tokens": request.max_tokens,
        "extra_args": dict(request.extra_args or {}),
    }


async def _ask(
    engine: Any, req_id: str, request: Mapping[str, Any], start_s: float
) -> tuple[dict[str, Any], list[int]]:
    """Serve one request when it is due; return what was seen of it, and the tokens."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    prompt = TokensPrompt(prompt_token_ids=request["prompt_token_ids"])
    if request.get("prompt") is not None:
        prompt["prompt"] = request["prompt"]
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=request["max_tokens"],
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=request["extra_args"],
    )
    await asyncio.sleep(start_s + request["arrival_s"] - time.monotonic())
    sent_s = time.monotonic() - start_s
    times_s: list[float] = []
    output_ids: list[int] = []
    reason, cached = None, 0
    async for output in engine.generate(prompt, sampling, req_id, priority=request.get("priority", 0)):
        completion = output.outputs[0]
        output_ids.extend(completion.token_ids)
        times_s.extend([time.monotonic() - start_s] * len(completion.token_ids))
        reason, cached = completion.finish_reason, output.num_cached_tokens or cached
    served = {
        "req_id": req_id,
        "arrival_s": request["arrival_s"],
        "sent_s": sent_s,
        "token_times_s": times_s,
        "output_tokens": request["output_tokens"],
        "prompt_tokens": len(request["prompt_token_ids"]),
        "cached_tokens": cached,
        "finish_reason": reason,
    }
    return served, output_ids


class StepStats:
    """Time-weighted queue lengths, counts of preemptions, and where KV was found, from the statistics of each step."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything; counts start now."""
        self._last = time.monotonic()
        self._elapsed_s = 0.0
        self._areas = {"waiting_requests": 0.0, "running_requests": 0.0, "kv_usage_fraction": 0.0}
        self._values = dict.fromkeys(self._areas, 0.0)
        self._max_kv_usage = 0.0
        self._preemptions = 0
        self._steps = 0
        self.copies = dict.fromkeys((*FOUND, *COPIED), 0.0)

    def observe(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """Add one engine step; the values of a step hold until the next."""
        now = time.monotonic()
        for key, value in self._values.items():
            self._areas[key] += value * (now - self._last)
        self._elapsed_s += now - self._last
        self._last = now
        if scheduler_stats is not None:
            waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            usage = scheduler_stats.kv_cache_usage
            self._values = dict(zip(self._areas, (waiting, scheduler_stats.num_running_reqs, usage), strict=True))
            self._max_kv_usage = max(self._max_kv_usage, usage)
            self.observe_copies(scheduler_stats)
        if iteration_stats is not None:
            self._preemptions += iteration_stats.num_preempted_reqs
            self._steps += 1

    def observe_copies(self, stats: Any) -> None:
        """Add where the prompts of one step found their KV, and what was copied."""
        device, host = stats.prefix_cache_stats, stats.connector_prefix_cache_stats
        if device is not None:
            self.copies["device_hit_tokens"] += device.hits
            self.copies["preempted_tokens"] += device.preempted_queries
            self.copies["preempted_device_hit_tokens"] += device.preempted_hits
        if host is not None:
            self.copies["host_hit_tokens"] += host.hits
            self.copies["preempted_host_hit_tokens"] += host.preempted_hits
        values = (stats.kv_connector_stats or {}).get("data", {})
        for name, metric in COPIED.items():
            self.copies[name] += sum(values.get(metric, {}).values())

    def summary(self) -> dict[str, float]:
        """Flat metrics of the time since the last reset."""
        return {
            **{f"mean_{name}": area / (self._elapsed_s or 1.0) for name, area in self._areas.items()},
            "max_kv_usage_fraction": self._max_kv_usage,
            "preemptions": float(self._preemptions),
            "output_steps": float(self._steps),
        }


def step_stats_logger() -> Any:
    """A stat logger class whose ``state`` can be read back: vLLM builds its stat loggers itself."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Logger(StatLoggerBase):
        state = StepStats()

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            self.state.observe(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    return Logger


def settings_of(engine: Any) -> dict[str, Any]:
    """The engine settings that shape a measurement, as vLLM resolved them."""
    config = engine.vllm_config
    scheduler, cache, model = config.scheduler_config, config.cache_config, config.model_config
    return {
        "async_scheduling": bool(scheduler.async_scheduling),
        "block_size_tokens": cache.block_size,
        "chunked_prefill": bool(scheduler.enable_chunked_prefill),
        "dtype": str(model.dtype),
        "enforce_eager": bool(model.enforce_eager),
        "hf_overrides": model.hf_overrides,
        "load_format": str(config.load_config.load_format),
        "max_model_len": model.max_model_len,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
        "num_gpu_blocks": cache.num_gpu_blocks_override,
        "omp_threads_bind": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto"),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "unset"),
        "policy": scheduler.policy,
        "prefix_caching": bool(cache.enable_prefix_caching),
        "scheduler_cls": str(scheduler.scheduler_cls or "vLLM's default"),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
