"""vLLM's scheduler as our helpers see it: every name of it that they use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm_ext.kv.device.records import Records
    from vllm_ext.scheduling.device_place import DevicePlace

_STREAMING = RequestStatus.WAITING_FOR_STREAMING_REQ


class EngineState(Protocol):
    """The parts of ``vllm.v1.core.sched.scheduler.Scheduler`` that plans are made of and applied to."""

    running: list[Request]
    waiting: Any
    kv_holding_waiting: Any
    """vLLM's second waiting queue, which it serves before ``waiting``: requests that hold KV."""
    requests: dict[str, Request]
    current_step: int
    max_num_active_reqs: int
    """Sequences from which on vLLM admits no more."""
    max_num_scheduled_tokens: int
    num_lookahead_tokens: int
    num_spec_tokens: int
    max_model_len: int
    scheduler_reserve_full_isl: bool
    prefill_capacity_bound: bool
    adaptive_long_prefill_threshold: bool
    finished_recving_kv_req_ids: set[str]
    scheduler_config: Any
    lora_config: Any
    kv_cache_config: Any
    kv_cache_manager: Any
    _inflight_prefills: set[Request]
    records: Records | None
    """Ours, as the next: KV in 8 bits on the device; None: there is none."""
    place: DevicePlace | None
    """What it costs to leave KV there."""

    @property
    def deferred_frees(self) -> Any:
        """Blocks of preempted requests that are still read by steps under way."""
        ...

    def _inflight_prefill_reserved_blocks(self) -> int: ...


def largest_chunk(engine: EngineState) -> int | None:
    """Return the most tokens that vLLM gives a prompt in a step while there are others; None: no bound."""
    config = engine.scheduler_config
    threshold: int = config.long_prefill_token_threshold
    others = len(engine.running) + len(engine.waiting) + len(engine.kv_holding_waiting) - 1
    if not threshold or others < 1:
        return None
    if engine.adaptive_long_prefill_threshold:
        return max(threshold, int(config.max_num_batched_tokens) // (others + 1))
    return threshold


def loading(engine: EngineState) -> list[Request]:
    """Return the requests that load KV, or have loaded it and start before all others."""
    return [request for request in engine.kv_holding_waiting if request.status != _STREAMING]


def loaded(engine: EngineState) -> list[Request]:
    """Return those of them whose KV has come."""
    ready, under_way = engine.finished_recving_kv_req_ids, RequestStatus.WAITING_FOR_REMOTE_KVS
    return [r for r in loading(engine) if r.status != under_way or r.request_id in ready]


def prefilling(engine: EngineState) -> list[Request]:
    """Return the running requests with a part of their prompt still to compute."""
    return [request for request in engine._inflight_prefills if request.status == RequestStatus.RUNNING]


def awaits_grammar(request: Request) -> bool:
    """Whether the grammar of a request's output is still being compiled: vLLM would pass over it."""
    if request.status != RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        return False
    structured = request.structured_output_request
    return structured is None or not structured.is_grammar_ready


def grammar_failed(request: Request) -> bool:
    """Whether the grammar could not be compiled: vLLM must look at the request to say so to its client."""
    if request.status != RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR or awaits_grammar(request):
        return False
    structured = request.structured_output_request
    return structured is not None and isinstance(structured.grammar, Exception)


def could_join(request: Request) -> bool:
    """Whether vLLM will take the request if it fits, or pass over it: its output, grammar or KV is still on its way."""
    if request.num_stale_output_tokens and not request.drop_stale_output:
        return False
    if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        # vLLM looks whether the grammar is there only when a seat is free, which may be what we are to see to.
        return not awaits_grammar(request) and not grammar_failed(request)
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
