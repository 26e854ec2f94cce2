"""vLLM's scheduler as our helpers see it: every name of it that they use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from vllm.v1.request import Request, RequestStatus

from vllm_ext.contract.room import AdapterPlaces

if TYPE_CHECKING:
    from vllm_ext.kv.int8.place import DevicePlace
    from vllm_ext.kv.int8.records import Records

_STREAMING = RequestStatus.WAITING_FOR_STREAMING_REQ
_NOBODY: list[Request] = []


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
    max_num_encoder_input_tokens: int
    """Embeddings that a step may compute; 0 for models without an encoder."""
    encoder_cache_manager: Any
    is_encoder_decoder: bool
    scheduler_reserve_full_isl: bool
    prefill_capacity_bound: bool
    adaptive_long_prefill_threshold: bool
    finished_recving_kv_req_ids: set[str]
    scheduler_config: Any
    vllm_config: Any
    lora_config: Any
    kv_cache_config: Any
    kv_cache_manager: Any
    connector: Any
    """To KV elsewhere; None: there is none."""
    _inflight_prefills: set[Request]
    block_size: int
    defer_block_free: bool
    """Whether blocks of who leaves stay taken while steps under way may write them."""
    records: Records | None
    """Ours, as the next: KV in 8 bits on the device; None: there is none."""
    place: DevicePlace | None
    """What it costs to leave KV there."""

    @property
    def deferred_frees(self) -> Any:
        """Blocks of preempted requests that are still read by steps under way."""
        ...

    def cap_chunks(self, tokens: int | None) -> None:
        """Ours: give no running prompt more than so many tokens in the next steps; None: there is no bound."""
        ...

    def _inflight_prefill_reserved_blocks(self) -> int: ...


def tokens_left(request: Request) -> int:
    """Return the tokens of a running request that vLLM would schedule, drafts to verify included.

    It takes no step beyond the client's bound, which those that are under way may have reached.
    """
    in_flight: int = request.num_output_placeholders
    computed: int = request.num_computed_tokens
    if in_flight and computed + 2 - in_flight >= request.num_prompt_tokens + request.max_tokens:
        return 0
    return max(0, int(request.num_tokens_with_spec) + in_flight - computed)


class Lists(NamedTuple):
    """Who is in the engine, as vLLM's lists say before a step."""

    running: list[Request]
    prefilling: list[Request]
    """Of these: those with a part of their prompt still to compute."""
    num_parked: int
    """Those that hold KV but do not run."""
    loading: list[Request]
    """Of these: those that load it, or have loaded it and start before all others."""
    loaded: list[Request]
    """Of these: those whose KV has come."""
    largest_chunk: int | None
    """Most tokens that vLLM gives a prompt in a step while there are others; None: no bound."""


def read(engine: EngineState, num_waiting: int) -> Lists:
    """Read vLLM's lists, while so many wait. Cost: a look at each request that holds KV and does not decode."""
    loads = ready = _NOBODY
    num_parked = len(engine.kv_holding_waiting)
    if num_parked:
        loads, ready = loading(engine), loaded(engine)
    others = len(engine.running) + num_waiting + num_parked - 1
    chunk: int | None = engine.scheduler_config.long_prefill_token_threshold or None
    if others < 1:
        chunk = None
    elif chunk and engine.adaptive_long_prefill_threshold:
        chunk = max(chunk, int(engine.scheduler_config.max_num_batched_tokens) // (others + 1))
    return Lists(engine.running, prefilling(engine), num_parked, loads, ready, chunk)


def prefilling(engine: EngineState) -> list[Request]:
    """Return the running requests with a part of their prompt still to compute."""
    return [request for request in engine._inflight_prefills if request.status == RequestStatus.RUNNING]


def loading(engine: EngineState) -> list[Request]:
    """Return the requests that load KV, or have loaded it and start before all others."""
    return [request for request in engine.kv_holding_waiting if request.status != _STREAMING]


def loaded(engine: EngineState) -> list[Request]:
    """Return those of them whose KV has come."""
    ready, under_way = engine.finished_recving_kv_req_ids, RequestStatus.WAITING_FOR_REMOTE_KVS
    return [r for r in loading(engine) if r.status != under_way or r.request_id in ready]


def adapter_of(request: Request) -> int:
    """Return the number of a request's LoRA adapter; 0: it has none."""
    return 0 if request.lora_request is None else int(request.lora_request.lora_int_id)


def adapter_places(engine: EngineState) -> AdapterPlaces | None:
    """Return the LoRA adapters of who runs, or has loaded and starts before all others; None where there are none."""
    if not engine.lora_config:
        return None
    used = {adapter_of(request) for request in (*engine.running, *loaded(engine))} - {0}
    return AdapterPlaces(used, int(engine.lora_config.max_loras))


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
