"""The lines of a recording, as data; `vllm_ext.simulation.recording` says what each is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FORMAT = 1
"""Of the recordings this version writes and reads."""


class Line(BaseModel):
    """Any line; unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineSettings(Line):
    """What a recorded scheduler was built with; see `vllm_ext.observability.step_record.settings`."""

    system: str
    scheduler_cls: str
    options: dict[str, Any]
    runtime_coefficients: tuple[float, ...] | None = None
    runtime_pivot: tuple[int, float] | None = None
    policy: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    prefix_caching: bool
    async_scheduling: bool
    chunked_prefill: bool
    watermark: float
    long_prefill_token_threshold: int
    reserve_full_isl: bool
    lookahead_tokens: int
    speculative_tokens: int
    v2_model_runner: bool
    kv_groups: tuple[str, ...]
    connector: str | None


class Header(Line):
    """The first line of a run."""

    type: Literal["run"] = "run"
    format: Literal[1] = 1
    system: str
    """As the benchmark names it."""
    load: float
    """Fraction of the capacity."""
    repeat: int
    model: str
    """Name of the model or of its folder."""
    versions: dict[str, str]
    settings: EngineSettings
    client_start_s: float = 0.0
    """When the measured part began; ``request`` lines count from here."""
    facts: dict[str, Any] = Field(default_factory=dict)
    """What else was observed of the run: load of the machine, queue lengths."""


class _Call(Line):
    at_s: float
    end_s: float
    clock: tuple[float, ...]


class Add(_Call):
    """A request that reached the scheduler."""

    type: Literal["add"] = "add"
    req_id: str
    """vLLM's internal id: the client's, with a random suffix."""
    arrival_time: float
    """Wall clock of the front end, as vLLM's priority policy compares it."""
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int
    session_id: str | None
    cache_salt: str | None
    extra_args: dict[str, Any] | None
    unsupported: tuple[str, ...]
    """Features of the request that a replay does not model."""


class Step(_Call):
    """A decision."""

    type: Literal["step"] = "step"
    step: int
    throttled: bool
    scheduled: tuple[tuple[str, int], ...]
    computed: tuple[int, ...]
    """Per entry of ``scheduled``: tokens whose KV was there before."""
    new: tuple[str, ...]
    resumed: tuple[str, ...]
    preempted: tuple[str, ...]


class Update(_Call):
    """The output of a step."""

    type: Literal["update"] = "update"
    step: int
    """Number of the step it belongs to."""
    tokens: tuple[tuple[str, tuple[int, ...]], ...]
    """Sampled tokens by request, in the runner's order; none for a partial prefill."""
    finished: tuple[tuple[str, str], ...]
    """(request, finish reason)."""
    busy: bool
    """Whether the engine goes on at once."""


class Finish(_Call):
    """Requests ended from outside."""

    type: Literal["finish"] = "finish"
    req_ids: tuple[str, ...] | None
    """None: all."""
    status: str
    """Name of vLLM's ``RequestStatus``."""


class OtherCall(_Call):
    """A call that changes what is decided later."""

    type: Literal["call"] = "call"
    name: Literal["reset_prefix_cache", "set_pause_state", "update_predictions"]
    args: tuple[Any, ...]


class ClientRequest(Line):
    """What the client saw of one measured request."""

    type: Literal["request"] = "request"
    system: str
    load: float
    repeat: int
    req_id: str
    """The client's id: that of the ``add`` line without its random suffix."""
    source_id: str
    arrival_s: float
    """When it was due."""
    sent_s: float
    """When it was sent."""
    prompt_tokens: int
    output_tokens: int
    token_times_s: tuple[float, ...]


class End(Line):
    """The last line of a run."""

    type: Literal["end"] = "end"
    lines: int
    dropped: int


Entry = Add | Step | Update | Finish | OtherCall
ENTRIES: Mapping[str, type[Entry]] = {
    "add": Add,
    "step": Step,
    "update": Update,
    "finish": Finish,
    "call": OtherCall,
}
TYPES: Mapping[str, type[Line]] = {"run": Header, **ENTRIES, "request": ClientRequest, "end": End}
