"""One cell of `engine_compare.py`: a fresh engine, one system, one series of requests; run as a child process.

Method: start `AsyncLLM` in this process (its engine core and worker are processes of their own, as in `vllm serve`
without the HTTP layer), serve the warm-up requests one by one and the history requests all at once, then release the
measured requests at their arrival times and note when each token is received. Phases, if there are any, come between
warm-up and history: requests that are served one by one (``alone``) or all at once, and are reported by themselves. No
metric is computed here.

    python benchmarks/engine_cell.py SPEC.json OUT.json        (both written and read by engine_compare.py)
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_cpu import CpuClock

_PREDICTOR_START_S = 180.0


def main(spec_path: str, out_path: str) -> None:
    """Run the cell described by one JSON file and write what was observed to another."""
    spec = json.loads(Path(spec_path).read_text(encoding="utf-8"))
    os.environ["VLLM_EXT_BENCH_FORCED_LENGTH"] = "1"
    if spec["record_steps"]:
        os.environ["VLLM_EXT_BENCH_STEP_RECORD"] = "1"
    observed = asyncio.run(_run(spec))
    Path(out_path).write_text(json.dumps(observed), encoding="utf-8")


async def _run(spec: dict[str, Any]) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine_args = AsyncEngineArgs(**spec["engine_args"])
    load = load_recorder()
    started = time.monotonic()
    engine = AsyncLLM.from_engine_args(engine_args, stat_loggers=[load])
    try:
        start_s = time.monotonic() - started
        client = _Client(engine, spec["max_tokens"])
        for index, request in enumerate(spec["warmup"]):
            await client.serve(f"warmup-{index}", request, due=time.monotonic())
        if spec.get("predictor") is not None:
            await predictor_ready(engine)
        phases = {phase["name"]: await client.phase(**phase) for phase in spec.get("phases", ())}
        await client.serve_all("history", spec["history"], time.monotonic())
        before = await _counters(engine)
        load.state.reset()
        cpu = CpuClock()
        client_start_s = time.monotonic()
        served = await client.serve_all("measured", spec["requests"], client_start_s)
        return {
            "foreign_cpu_cores": cpu.foreign_cores(),
            "client_start_s": client_start_s,
            "record": await _fetch_record(engine) if spec["record_steps"] else None,
            "requests": served,
            "load": {**load.state.summary(), **_since(before, await _counters(engine))},
            "phases": phases,
            "settings": settings_of(engine),
            "engine_start_s": start_s,
            "predictor": _predictor_outcomes(),
        }
    finally:
        engine.shutdown()


def _predictor_outcomes() -> dict[str, float]:
    """What became of the predictions of this process's requests, warm-up and history included."""
    from prometheus_client import REGISTRY

    outcomes = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name == "vllm_ext:length_predictions_total":
                outcomes[f"length_predictions_{sample.labels['outcome'].replace('-', '_')}"] = sample.value
    return outcomes


async def predictor_ready(engine: Any) -> None:
    """Wait until the length predictor has loaded its model, which the first request started."""
    from vllm_ext.prediction.service.attach import attached

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
    from vllm_ext.observability.frontend import UTILITY

    if engine.vllm_config.scheduler_config.scheduler_cls is None:
        return {}
    state = await engine.engine_core.call_utility_async(UTILITY, 1 << 60)  # no records of requests
    found = {name: float(state[name]) for name in ("policy_s", "policy_steps", "fallbacks", "stalls")}
    return found | {f"preemptions_{reason}": float(count) for reason, count in state["preemptions"].items()}


def _since(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    """What our scheduler counted meanwhile: preemptions by reason, failures, and the time of policies per step."""
    spent = {name: value - before.get(name, 0.0) for name, value in now.items()}
    policy_s, policy_steps = spent.pop("policy_s", 0.0), spent.pop("policy_steps", 0.0)
    if policy_steps:
        spent["policy_us_per_step"] = policy_s / policy_steps * 1e6
    return spent


async def _fetch_record(engine: Any) -> dict[str, Any]:
    from vllm_ext.observability import step_record

    return await step_record.fetch(engine)


class _Client:
    """Sends requests at their time and notes when tokens come back."""

    def __init__(self, engine: Any, max_tokens: int) -> None:
        self._engine = engine
        self._max_tokens = max_tokens

    async def serve_all(self, label: str, requests: Sequence[dict[str, Any]], start: float) -> list[dict[str, Any]]:
        """Serve requests at their ``arrival_s`` after the monotonic time ``start``; times returned count from there."""
        tasks = [
            self.serve(f"{label}-{i}", request, start + request["arrival_s"]) for i, request in enumerate(requests)
        ]
        served = await asyncio.gather(*tasks)
        for record in served:
            record["sent_s"] -= start
            record["token_times_s"] = [t - start for t in record["token_times_s"]]
        return list(served)

    async def phase(self, name: str, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Serve the requests of a phase, one by one if it is called ``alone``; times count from the start of each."""
        if name != "alone":
            return await self.serve_all(name, requests, time.monotonic())
        return [await self.serve_alone(f"{name}-{i}", request) for i, request in enumerate(requests)]

    async def serve_alone(self, req_id: str, request: dict[str, Any]) -> dict[str, Any]:
        """Serve one request now; times count from now."""
        (served,) = await self.serve_all(req_id, [{**request, "arrival_s": 0.0}], time.monotonic())
        return served

    async def serve(self, req_id: str, request: dict[str, Any], due: float) -> dict[str, Any]:
        """Serve one request at monotonic time ``due``."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        from vllm_ext.observability import forced_length

        prompt = TokensPrompt(prompt_token_ids=request["prompt_token_ids"])
        if request["prompt"] is not None:
            prompt["prompt"] = request["prompt"]
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=self._max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={**forced_length.extra_args(request["output_tokens"]), **request["hints"]},
        )
        await asyncio.sleep(due - time.monotonic())
        sent = time.monotonic()
        times: list[float] = []
        finish_reason = None
        async for output in self._engine.generate(prompt, sampling, req_id, priority=request["priority"]):
            completion = output.outputs[0]
            times.extend([time.monotonic()] * len(completion.token_ids))
            finish_reason = completion.finish_reason
        return {"req_id": req_id, "sent_s": sent, "token_times_s": times, "finish_reason": finish_reason}


class _LoadState:
    """Time-weighted queue lengths and counts of preemptions, from the statistics of each engine step."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything; counts start now."""
        self._last = time.monotonic()
        self._elapsed_s = 0.0
        self._areas = {"waiting": 0.0, "running": 0.0, "kv_usage": 0.0}
        self._values = dict.fromkeys(self._areas, 0.0)
        self._max_kv_usage = 0.0
        self._preemptions = 0
        self._steps = 0

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
            self._values = {"waiting": waiting, "running": scheduler_stats.num_running_reqs, "kv_usage": usage}
            self._max_kv_usage = max(self._max_kv_usage, usage)
        if iteration_stats is not None:
            self._preemptions += iteration_stats.num_preempted_reqs
            self._steps += 1

    def summary(self) -> dict[str, float]:
        """Flat metrics of the time since the last reset."""
        elapsed = self._elapsed_s or 1.0
        return {
            "mean_waiting_requests": self._areas["waiting"] / elapsed,
            "mean_running_requests": self._areas["running"] / elapsed,
            "mean_kv_usage_fraction": self._areas["kv_usage"] / elapsed,
            "max_kv_usage_fraction": self._max_kv_usage,
            "preemptions": float(self._preemptions),
            "output_steps": float(self._steps),
        }


def load_recorder() -> Any:
    """A stat logger class whose ``state`` can be read back: vLLM builds its stat loggers itself."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class LoadRecorder(StatLoggerBase):
        state = _LoadState()

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            self.state.observe(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    return LoadRecorder


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
