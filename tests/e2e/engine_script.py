"""Run one offline engine through a request script and write what came out as JSON.

    python engine_script.py JOB.json RESULT.json

A job is ``{"boot": "plain" | "async" | "pipeline" | "v2" | "cuda", "run": run}``; a run is ``{"name", "engine": {LLM
arguments}, "arrivals": [{"step", "id", "prompt_token_ids", "sampling": {SamplingParams arguments}}, ...]}`` and perhaps
``"odd_loads"``, ``"odd_gaps"`` or ``"odd_records"``: see there; ``"leavers"``: {phase: [ids]}, see `odd_aborts`;
``"disk"``: {"folder", "fills"} of a tier, see `disk_watch`; ``"naps"``: {step: level of sleep}; ``"spawn"``: whether
tensor-parallel workers are spawned, as vLLM does on a CPU, and import it again; or ``"record"``: whether what the
scheduler is told and decides is recorded. An arrival may name the turn it comes ``"after"``, be aborted by its client
``"abort_after"`` so many steps, ``"drops"`` so many first tokens of that turn's answer, as templates do with thinking,
and have ``"images"`` in its prompt, noise: ``[height, width, seed]``. The engine core lives in this process, so that
its scheduler can be looked at, and requests arrive between given steps. What our schedulers decide by goes by steps
(`by_steps`): a run is the same on every machine, whatever else that does.

``v2`` and ``cuda`` need processes of their own, because Triton must be changed before vLLM is imported; the others may
be forks of one that has imported it (`fork_server`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_STEPS = 3000
"""Steps after which a run counts as hung; the largest run here takes a few hundred."""


def boot(kind: str) -> None:
    """Prepare this process, before its engine is built. Raises KeyError for an unknown kind."""

    def plain() -> None: ...

    def asynchronous() -> None:
        import async_shim

        async_shim.install()

    def pipeline() -> None:
        import pipeline_shim

        pipeline_shim.install()

    def v2() -> None:
        import interp_boot

        interp_boot.install()

    def cuda() -> None:
        import cuda_boot

        cuda_boot.install()

    {"plain": plain, "async": asynchronous, "pipeline": pipeline, "v2": v2, "cuda": cuda}[kind]()


def sampling_params(raw: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    raw = dict(raw)
    if "structured_outputs" in raw:
        raw["structured_outputs"] = StructuredOutputsParams(**raw["structured_outputs"])
    return SamplingParams(temperature=0.0, **raw)


_adapters: dict[str, int] = {}
"""Numbers of adapters, by folder."""


def adapter(folder: str | None) -> Any:
    """The LoRA adapter of a folder, or none."""
    if folder is None:
        return None
    from vllm.lora.request import LoRARequest

    number = _adapters.setdefault(folder, len(_adapters) + 1)
    return LoRARequest(f"adapter-{number}", number, folder)


def due(waiting: list[dict[str, Any]], step: int, finished: dict[str, Any], *, idle: bool) -> dict[str, Any] | None:
    """The next arrival whose step has come, or any if the engine is idle; a turn comes after the one before it."""
    ready = (a for a in waiting if a.get("after") is None or a["after"] in finished)
    arrival = next(ready, None)
    return arrival if arrival is not None and (idle or arrival["step"] <= step) else None


def noise(height: int, width: int, seed: int) -> Any:
    """An image."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def prompt_of(arrival: dict[str, Any], finished: dict[str, Any]) -> list[int]:
    """An arrival's prompt; that of a later turn begins with the turn before it and its answer, or the rest of that."""
    tokens: list[int] = arrival["prompt_token_ids"]
    if (before := finished.get(arrival.get("after", ""))) is None:
        return tokens
    answer = before.outputs[0].token_ids[arrival.get("drops", 0) :]
    return [*before.prompt_token_ids, *answer, *tokens]


def nap(engine: Any, level: int) -> None:
    """Put the engine to sleep, with requests waiting and running, and wake it up again."""
    engine.sleep(level=level, mode="keep")
    for _ in range(3):
        if engine.step():
            raise RuntimeError("the engine answered in its sleep")
    engine.wake_up()
    if engine.is_sleeping():
        raise RuntimeError("the engine did not wake up")


def drive(
    engine: Any, arrivals: list[dict[str, Any]], naps: dict[int, int], before_step: Callable[[], None] | None
) -> dict[str, Any]:
    """Step the engine until every request of ``arrivals`` has finished; returns the final output of each by id.

    ``naps`` are levels of sleep by the step before which they come.
    """
    finished: dict[str, Any] = {}
    waiting = sorted(arrivals, key=lambda a: a["step"])
    step = 0
    naps = dict(naps)
    aborts: dict[str, int] = {}
    while waiting or engine.has_unfinished_requests():
        while arrival := due(waiting, step, finished, idle=not engine.has_unfinished_requests()):
            waiting.remove(arrival)
            prompt: dict[str, Any] = {"prompt_token_ids": prompt_of(arrival, finished)}
            if "images" in arrival:
                prompt["multi_modal_data"] = {"image": [noise(*image) for image in arrival["images"]]}
            params = sampling_params(arrival["sampling"])
            engine.add_request(arrival["id"], prompt, params, lora_request=adapter(arrival.get("adapter")))
            if "abort_after" in arrival:
                aborts[arrival["id"]] = step + arrival["abort_after"]
        if step in naps:
            nap(engine, naps.pop(step))
        for req_id in [req_id for req_id, at in aborts.items() if at <= step]:
            del aborts[req_id]
            engine.abort_request([req_id])
        if before_step is not None:
            before_step()
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
        step += 1
        if step > MAX_STEPS:
            missing = sorted({arrival["id"] for arrival in arrivals} - set(finished))  # or aborted
            raise RuntimeError(f"not finished after {MAX_STEPS} steps: {missing}")
    if naps:
        raise RuntimeError(f"finished after {step} steps, before the naps at {sorted(naps)}")
    return finished


def counter(llm: Any, name: str) -> float:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


def steered_state(scheduler: Any) -> dict[str, Any]:
    """The state a scheduler of ours shows to the front end; nothing for vLLM's own."""
    return scheduler.vllm_ext_state() if hasattr(scheduler, "vllm_ext_state") else {}


def runner(executor: Any) -> str:
    """The module of the model runner; nothing where workers are processes of their own."""
    worker = getattr(executor, "driver_worker", None)
    return "" if worker is None else type(worker.worker.model_runner).__module__


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """One engine, one request script; ends the engine's workers and copies."""
    import by_steps
    import plan_counts
    from vllm import LLM

    by_steps.hold_copies()
    if spec.get("spawn"):
        _spawn_workers()
    if spec.get("record"):
        from vllm_ext.simulation.recorded import recorder

        recorder.install()
    if spec["engine"].get("enable_lora"):
        import lora_kernels

        lora_kernels.mend()
    llm = LLM(disable_log_stats=False, **spec["engine"])
    core = llm.llm_engine.engine_core.engine_core
    pool = core.scheduler.kv_cache_manager.block_pool
    free_before = pool.get_num_free_blocks()
    if "odd_loads" in spec:
        import odd_loads

        odd_loads.install(spec["odd_loads"])
    by_steps.compile_grammars_at_once(core)
    if hasattr(core.scheduler, "clock"):
        by_steps.go_by_steps(core.scheduler)
    plans = plan_counts.count(core.scheduler)
    before_step: Callable[[], None] | None = None
    if "odd_gaps" in spec:
        import odd_gaps

        before_step = odd_gaps.install(spec["odd_gaps"], core)
    if "odd_records" in spec:
        import odd_records

        before_step = odd_records.install(spec["odd_records"], core)
    poisons = before_step
    leavers = None
    if "leavers" in spec:
        import odd_aborts

        leavers = odd_aborts.Leavers(llm.llm_engine, core, spec["leavers"])
        before_step = leavers.before_step if poisons is None else _both(leavers.before_step, poisons)
    disk = None
    if "disk" in spec:
        import disk_watch

        disk = disk_watch.DiskWatch(Path(spec["disk"]["folder"]), fills=spec["disk"]["fills"])
        before_step = disk.before_step if before_step is None else _both(disk.before_step, before_step)
    naps = {int(step): level for step, level in spec.get("naps", {}).items()}
    outputs = drive(llm.llm_engine, spec["arrivals"], naps, before_step)
    result = {
        "tokens": {key: list(output.outputs[0].token_ids) for key, output in outputs.items()},
        "texts": {key: output.outputs[0].text for key, output in outputs.items()},
        "finish_reasons": {key: output.outputs[0].finish_reason for key, output in outputs.items()},
        "preemptions": counter(llm, "vllm:num_preemptions"),
        "preemption_reasons": steered_state(core.scheduler).get("preemptions", {}),
        "fallbacks": steered_state(core.scheduler).get("fallbacks", 0),
        "gaps": steered_state(core.scheduler).get("kv_gaps", {}),
        "kv_device": steered_state(core.scheduler).get("kv_device", {}),
        "kv_tier": steered_state(core.scheduler).get("kv_tier", {}),
        "attention": core.vllm_ext_state().get("attention", {}) if hasattr(core.scheduler, "clock") else {},
        "left": {} if leavers is None else leavers.left,
        "fullest": 0.0 if leavers is None else leavers.fullest,
        "plans": plans,
        "drafts": counter(llm, "vllm:spec_decode_num_drafts"),
        "accepted_tokens": counter(llm, "vllm:spec_decode_num_accepted_tokens"),
        "host_hit_tokens": counter(llm, "vllm:external_prefix_cache_hits"),
        "host_bytes_stored": counter(llm, "vllm:kv_offload_store_bytes"),
        "host_bytes_loaded": counter(llm, "vllm:kv_offload_load_bytes"),
        "disk": {} if disk is None else disk.found(llm.get_metrics()),
        "scheduler": type(core.scheduler).__name__,
        "batch_queue": core.batch_queue_size,
        "runner": runner(core.model_executor),
        "blocks_missing": free_before - pool.get_num_free_blocks(),
        "left_running": len(core.scheduler.running),
        "left_waiting": len(core.scheduler.waiting),
        "record": _record(core.scheduler),
    }
    core.shutdown()
    return result


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def before_step() -> None:
        first()
        second()

    return before_step


def _record(scheduler: Any) -> dict[str, Any]:
    """What was recorded, if anything was."""
    record = getattr(scheduler, "step_record", None)
    if record is None:
        return {}
    lines: list[str] = []
    while (part := record.since(len(lines)))["lines"]:
        lines += part["lines"]
    return {"settings": record.settings, "lines": lines, "dropped": record.dropped}


def _spawn_workers() -> None:
    """Let tensor-parallel workers be spawned where `fork_server` made forks of them."""
    from vllm.utils.system_utils import get_mp_context
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = get_mp_context


def main() -> None:
    job_file, result_file = sys.argv[-2:]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    job = json.loads(Path(job_file).read_text())
    boot(job["boot"])
    Path(result_file).write_text(json.dumps(run(job["run"])))


if __name__ == "__main__":
    main()
