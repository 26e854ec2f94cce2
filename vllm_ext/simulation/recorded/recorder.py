"""Records what a scheduler was told, when, and what it decided: enough to repeat a run exactly without its engine.

Benchmarks switch it on for the engines they start (``VLLM_EXT_BENCH_STEP_RECORD=1``); it holds for every scheduler,
upstream's included. The record is kept in memory and bounded: nothing is written on the step path, and a front end
fetches it after the run. The lines it is made of are described in `vllm_ext.simulation.recorded.recording`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_ext import envs
from vllm_ext.hooks.patch import Addition, Patch, Undo

UTILITY = "vllm_ext_step_record"
"""Name of the engine core's utility call."""
CAPACITY = 4_000_000
"""Bound on rows of steps and tokens of prompts together; a row takes some 50 bytes."""
_CHUNK = 2000
_KEY = "vllm_ext"
_OF_THE_MACHINE = ("profile", "request_log", "step_record", "tuned", "predictor")
"""Options that name files; they shape no decision beyond the coefficients and predictions that are recorded."""


class StepRecord:
    """The entries of one scheduler, in the order in which things happened to it.

    A full record takes no more, so that what it holds stays free of gaps; ``dropped`` counts what came later.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.settings: dict[str, Any] = {}
        """What the scheduler was built with; see `settings`."""
        self.entries: list[dict[str, Any]] = []
        self.dropped = 0
        self._room = capacity
        self._depth = 0
        self._readings: list[float] = []
        self._step_numbers: dict[int, int] = {}
        self._num_steps = 0

    @contextmanager
    def call(self) -> Iterator[dict[str, Any] | None]:
        """Record a call from outside: yields the entry to complete, or None inside of another recorded call.

        A call that raises leaves no entry.
        """
        self._depth += 1
        try:
            if self._depth > 1:
                yield None
                return
            self._readings = []
            entry: dict[str, Any] = {"at_s": time.monotonic()}
            yield entry
            entry["end_s"] = time.monotonic()
            entry["clock"] = self._readings
            self._append(entry)
        finally:
            self._depth -= 1

    def read(self, clock: Callable[[], float]) -> float:
        """Read the scheduler's clock for it."""
        value = clock()
        if self._depth:  # else somebody looks at the state from outside
            self._readings.append(value)
        return value

    def step(self, entry: dict[str, Any], output: Any, throttled: bool) -> None:
        """Complete the entry of a ``schedule()``."""
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        scheduled = output.num_scheduled_tokens
        entry.update(
            type="step",
            step=self._num_steps,
            throttled=throttled,
            scheduled=tuple(scheduled.items()),
            computed=tuple(computed[req_id] for req_id in scheduled),
            new=tuple(new.req_id for new in output.scheduled_new_reqs),
            resumed=tuple(r for r in cached.req_ids if r in cached.resumed_req_ids),
            preempted=tuple(sorted(output.preempted_req_ids or ())),
        )
        self._step_numbers[id(output)] = self._num_steps  # its scheduler's loop holds on to it until the update
        self._num_steps += 1

    def update(self, entry: dict[str, Any], output: Any, model_output: Any) -> None:
        """Begin the entry of an ``update_from_output()``; the call itself may cut the sampled tokens short."""
        sampled = model_output.sampled_token_ids or [()] * len(model_output.req_ids)
        entry.update(
            type="update",
            step=self._step_numbers.pop(id(output), -1),
            tokens=tuple((req_id, tuple(ids)) for req_id, ids in zip(model_output.req_ids, sampled, strict=True)),
        )

    def since(self, number: int) -> dict[str, Any]:
        """Return entries from ``number`` on as lines of JSON, with the number to go on from; None at the end."""
        chunk = self.entries[number : number + _CHUNK]
        following = number + len(chunk)
        return {
            "settings": self.settings,
            "lines": [json.dumps(entry) for entry in chunk],
            "next": following if following < len(self.entries) else None,
            "dropped": self.dropped,
        }

    def _append(self, entry: dict[str, Any]) -> None:
        size = 1 + len(entry.get("scheduled", ())) + len(entry.get("tokens", ())) + len(entry.get("prompt", ()))
        if self.dropped or size > self._room:
            self.dropped += 1
            return
        self._room -= size
        self.entries.append(entry)


class Recording:
    """Goes before a scheduler class, as `recorded` makes it, and records the calls it gets from outside."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.step_record = StepRecord()
        super().__init__(*args, **kwargs)
        self.step_record.settings = settings(self)

    @property
    def clock(self) -> Callable[[], float]:
        """The clock of our scheduler; each reading that a recorded call takes is kept. Upstream's has none."""
        clock: Callable[[], float] = self._recorded_clock
        return clock

    @clock.setter
    def clock(self, clock: Callable[[], float]) -> None:
        self._recorded_clock = lambda: self.step_record.read(clock)

    def add_request(self, request: Any) -> None:
        """As the scheduler's; recorded with all that the request asks for."""
        with self.step_record.call() as entry:
            if entry is not None:
                entry.update(_request_entry(request))
            super().add_request(request)  # type: ignore[misc]

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """As the scheduler's; recorded with what it decided."""
        with self.step_record.call() as entry:
            output = super().schedule(throttle_prefills)  # type: ignore[misc]
            if entry is not None:
                self.step_record.step(entry, output, throttle_prefills)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As the scheduler's; recorded with the tokens that came, who finished, and whether there is work left."""
        with self.step_record.call() as entry:
            if entry is not None:
                self.step_record.update(entry, scheduler_output, model_runner_output)
            outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
            if entry is not None:
                entry["finished"] = tuple(
                    (one.request_id, str(one.finish_reason))
                    for by_client in outputs.values()
                    for one in by_client.outputs
                    if one.finish_reason is not None
                )
                entry["busy"] = bool(self.has_requests())  # type: ignore[attr-defined]
        return outputs

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """As the scheduler's; recorded with ids and status."""
        if request_ids is not None and not isinstance(request_ids, str):
            request_ids = list(request_ids)
        with self.step_record.call() as entry:
            if entry is not None:
                ids = [request_ids] if isinstance(request_ids, str) else request_ids
                entry.update(type="finish", req_ids=ids, status=finished_status.name)
            return super().finish_requests(request_ids, finished_status)  # type: ignore[misc]

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """As the scheduler's; recorded with its arguments."""
        return self._call("reset_prefix_cache", [*args, *kwargs.values()], *args, **kwargs)

    def set_pause_state(self, pause_state: Any) -> None:
        """As the scheduler's; recorded with the state's name."""
        self._call("set_pause_state", [pause_state.name], pause_state)

    def update_predictions(self, rows: Any) -> int:
        """As `SteeredScheduler.update_predictions`; recorded with all rows."""
        taken: int = self._call("update_predictions", [[list(row) for row in rows]], rows)
        return taken

    def _call(self, name: str, recorded: list[Any], *args: Any, **kwargs: Any) -> Any:
        with self.step_record.call() as entry:
            if entry is not None:
                entry.update(type="call", name=name, args=recorded)
            return getattr(super(), name)(*args, **kwargs)


def recorded(scheduler_cls: type) -> type:
    """Return a subclass of a scheduler class that records its calls; one that does already is returned as it is."""
    if issubclass(scheduler_cls, Recording):
        return scheduler_cls
    return type(f"Recorded{scheduler_cls.__name__}", (Recording, scheduler_cls), {"recorded_class": scheduler_cls})


def settings(scheduler: Any) -> dict[str, Any]:
    """Return what decides a scheduler's behaviour, fit for JSON and free of paths; equal settings decide equally."""
    config = scheduler.vllm_config
    engine, cache = config.scheduler_config, config.cache_config
    cls = getattr(scheduler, "recorded_class", type(scheduler))
    options = dict((config.additional_config or {}).get(_KEY) or {})
    upstream = "upstream-priority" if engine.policy == "priority" else "upstream-fcfs"
    start = scheduler.tracked.runtime.given if hasattr(scheduler, "tracked") else None
    return {
        "system": scheduler.config.system if hasattr(scheduler, "tracked") else upstream,
        "scheduler_cls": f"{cls.__module__}.{cls.__qualname__}",
        "options": {name: value for name, value in options.items() if name not in _OF_THE_MACHINE},
        "runtime_coefficients": None if start is None else list(start),
        "runtime_pivot": None if start is None else scheduler.tracked.runtime.given_pivot,
        "policy": engine.policy,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": scheduler.max_model_len,
        "block_size": cache.block_size,
        "num_blocks": scheduler.kv_cache_config.num_blocks,
        "prefix_caching": bool(cache.enable_prefix_caching),
        "async_scheduling": bool(engine.async_scheduling),
        "chunked_prefill": bool(engine.enable_chunked_prefill),
        "watermark": getattr(engine, "watermark", 0.0),
        "long_prefill_token_threshold": engine.long_prefill_token_threshold,
        "reserve_full_isl": bool(getattr(scheduler, "scheduler_reserve_full_isl", False)),
        "lookahead_tokens": scheduler.num_lookahead_tokens,
        "speculative_tokens": scheduler.num_spec_tokens,
        "v2_model_runner": bool(scheduler.use_v2_model_runner),
        "kv_groups": [type(group.kv_cache_spec).__name__ for group in scheduler.kv_cache_config.kv_cache_groups],
        "connector": type(scheduler.connector).__name__ if scheduler.connector is not None else None,
    }


def install() -> Undo:
    """Install the hooks in this process and return an undo; a second call changes nothing.

    Raises:
        UpstreamMissing, UpstreamChanged: vLLM is not as verified; nothing was changed.
    """
    ADDITION.verify()
    undo_patch = PATCH.apply()
    undo_addition = ADDITION.apply()

    def undo() -> None:
        undo_addition()
        undo_patch()

    return undo


async def fetch(engine: Any) -> dict[str, Any]:
    """Return the whole record of an ``AsyncLLM``'s engine core: ``settings``, ``lines`` and ``dropped``."""
    lines: list[str] = []
    following: int | None = 0
    chunk: dict[str, Any] = {}
    while following is not None:
        chunk = await engine.engine_core.call_utility_async(UTILITY, following)
        lines += chunk["lines"]
        following = chunk["next"]
    return {"settings": chunk["settings"], "lines": lines, "dropped": chunk["dropped"]}


def _request_entry(request: Any) -> dict[str, Any]:
    sampling = request.sampling_params
    unsupported = {
        "pooling": sampling is None,
        "structured output": getattr(request, "use_structured_output", False),
        "multimodal input": bool(getattr(request, "mm_features", None)),
        "LoRA": request.lora_request is not None,
        "streaming input": bool(getattr(request, "resumable", False)),
        "prompt embeddings": request.prompt_token_ids is None,
        "no reading of the prefix cache": bool(getattr(sampling, "skip_reading_prefix_cache", False)),
    }
    return {
        "type": "add",
        "req_id": request.request_id,
        "arrival_time": request.arrival_time,
        "prompt": tuple(request.prompt_token_ids or ()),
        "max_tokens": request.max_tokens,
        "priority": request.priority,
        "session_id": getattr(request, "session_id", None),
        "cache_salt": request.cache_salt,
        "extra_args": getattr(sampling, "extra_args", None),
        "unsupported": [name for name, found in unsupported.items() if found],
    }


def _get_scheduler_cls(original: Callable[[Any], type], config: Any) -> type:
    return recorded(original(config))


def _utility(self: Any, since: int = 0) -> dict[str, Any]:
    """Return a part of the step record, from entry number ``since`` on."""
    record: dict[str, Any] = self.scheduler.step_record.since(since)
    return record


_FEATURE = "step record (benchmarks only)"
_LEAVE_OUT = f"{envs.BENCH_STEP_RECORD}=1"
PATCH = Patch(
    target="vllm.config.scheduler:SchedulerConfig.get_scheduler_cls",
    feature=_FEATURE,
    why=(
        "records the calls of any scheduler, upstream's own included. A scheduler class of ours would leave those out; "
        "EngineCore.__init__ is running already when it loads plugins"
    ),
    breaks_without="runs of the real engine can't be replayed in virtual time",
    remove_when="vLLM records its schedulers' inputs and decisions itself",
    leave_out=_LEAVE_OUT,
    verified={"0.32.0": "6cc765d0cbcb743a"},
    replacement=_get_scheduler_cls,
)
ADDITION = Addition(
    target=f"vllm.v1.engine.core:EngineCore.{UTILITY}",
    feature=_FEATURE,
    why="utility calls are dispatched by name on EngineCore",
    breaks_without="the record stays in the engine core",
    remove_when="as the patch beside it",
    leave_out=_LEAVE_OUT,
    value=_utility,
)
"""The hooks; not part of any group, because no feature for users needs them."""
