"""What a simulation run is described by: plain data that can be written to JSON, hashed and sent to another process.

A wrong field, value, system or option is an error before anything is run; nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from vllm_ext import config, systems
from vllm_ext.config import ConfigError, made
from vllm_ext.config.model import Flag, Model
from vllm_ext.simulation.cost.spec import CostSpec, Hardware, HardwareSpec
from vllm_ext.simulation.workloads.spec import WorkloadSpec

UPSTREAM = {"upstream-fcfs": "fcfs", "upstream-priority": "priority"}
"""vLLM's own schedulers, which take no options of vllm_ext, and its names of their policies."""
_GIB = 1 << 30


class KvOffloadSpec(BaseModel):
    """KV in host memory behind the devices', as vLLM's OffloadingConnector keeps it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu_bytes: int = Field(ge=1)
    """Host memory for KV, for all devices together (``cpu_bytes_to_use``)."""
    policy: Literal["lru", "arc"] = "lru"
    """Which chunks leave host memory when it is full."""
    offload_prompt_only: bool = False
    """Keep the KV of prompts only. vLLM's own default is True: what was generated is then computed again when a
    preempted request resumes, or in the next turn of a conversation."""
    blocks_per_chunk: int = Field(default=1, ge=1)
    """Blocks that are kept and evicted together; what doesn't fill a chunk is not kept."""


class EngineSpec(BaseModel):
    """The engine's settings, named and defaulted as by vLLM 0.32 for online serving on the simulated device."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    system: str = "fcfs"
    """``upstream-fcfs`` or ``upstream-priority`` for vLLM alone, or what ``--scheduler-cls`` takes."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of vllm_ext, as under ``additional_config["vllm_ext"]``."""
    scheduling_policy: Annotated[Literal["fcfs", "priority"], Flag()] = "fcfs"
    """``priority``: the requests' ``priority`` counts. Of our systems; vLLM alone has a name for each."""
    max_num_seqs: Annotated[int | None, Flag()] = Field(default=None, ge=1)
    """Requests running at once; None: vLLM's default for the device."""
    max_num_batched_tokens: Annotated[int | None, Flag()] = Field(default=None, ge=1)
    """Tokens computed per step; None: vLLM's default for the device."""
    max_model_len: Annotated[int | None, Flag()] = Field(default=None, ge=2)
    """Longest sequence, in tokens; longer prompts are rejected. None: the longest context the model was made for."""
    block_size: Annotated[int, Flag()] = Field(default=16, ge=1)
    """Tokens per KV block."""
    num_blocks: Annotated[int | None, Flag("--num-blocks --num-gpu-blocks-override")] = Field(
        default=None, ge=2, le=2**24
    )
    """KV blocks, for each of which vLLM makes an object; None: what the memory holds beside weights and activations."""
    prefix_caching: Annotated[bool, Flag()] = True
    """Reuse the KV of equal prefixes."""
    async_scheduling: Annotated[bool, Flag()] = True
    """Schedule a step while one is computed."""
    watermark: Annotated[float, Flag()] = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the KV blocks that is kept free when requests are admitted."""
    kv_offload: KvOffloadSpec | None = None
    """Copy KV to host memory and load it from there; None: KV that leaves the device is computed again."""
    profiled: Annotated[bool, Flag()] = False
    """The runtime model of our systems starts from a profile of the simulated hardware, as after ``vllm-ext profile``;
    False: from its defaults, or the ``profile`` of ``options``. vLLM alone has no runtime model: nothing changes."""


class RecordSpec(BaseModel):
    """What a run keeps beyond its metrics."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token_times: bool = False
    """Keep the time of every token (8 bytes each); a point of a sweep then tells which came in time: `iterations`."""
    events: int = Field(default=0, ge=0)
    """Keep this many step and request events for a trace; 0: none."""
    decisions: bool = False
    """Keep what every step decided."""
    backlog: bool = False
    """Count how full memory was, and with true lengths would become, over the steps that left somebody waiting."""
    windows: int = Field(default=0, ge=0)
    """Tell some metrics also of so many parts of the requests, by arrival, as ``window_K.METRIC``; see `windows_of`."""


class SimulationSpec(BaseModel):
    """One run: who asks for what, what serves it, and on which hardware."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )

    engine: EngineSpec = EngineSpec()
    hardware: HardwareSpec = HardwareSpec()
    cost: CostSpec = CostSpec()
    workload: WorkloadSpec = WorkloadSpec()
    record: RecordSpec = RecordSpec()
    max_time_s: Annotated[float | None, Flag("--max-time")] = Field(default=None, gt=0)
    """Stop at this virtual time, in seconds; requests that have not ended by then are counted as unfinished, and have
    missed the objectives they can no longer meet."""
    replicas: int = Field(default=1, ge=1)
    """Such engines, behind a router, that share the load; `simulation.cluster` serves by more than one."""
    router: str = ""
    """Who chooses among them, of `routing.routers`; empty: `marginal`, in whose place vLLM alone, which tells routers
    nothing, has `round-robin`."""
    exact: Annotated[bool, Flag()] = False
    """Tell vLLM's scheduler of every request in every step: the same results to the last digit, several times later.
    With `device_int8_share` it always is."""


class Limits(NamedTuple):
    """The engine's settings that bound a step, as vLLM names them."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


def limits_of(engine: EngineSpec, hardware: Hardware) -> Limits:
    """Return the limits of an engine, with vLLM's defaults for the device where it leaves them open.

    The rules of ``EngineArgs.get_batch_defaults`` for the API server, which asks the device that it runs on. A default
    budget is at most what all seats can hold, and a default number of seats at most the budget.
    """
    device, split = hardware.device, hardware.spec.tensor_parallel
    seats, tokens = 256, 2048
    if device.name == "cpu":
        seats, tokens = 128 * split, 2048 * split
    elif device.memory_bytes >= 160 * _GIB:
        seats, tokens = 1024, 16_384
    elif device.memory_bytes >= 70 * _GIB and not device.name.startswith("a100"):
        seats, tokens = 1024, 8192
    max_model_len = engine.max_model_len or hardware.model.max_positions
    seats = engine.max_num_seqs or seats
    tokens = engine.max_num_batched_tokens or min(tokens, seats * max_model_len)
    return Limits(max_model_len, engine.max_num_seqs or min(seats, tokens), tokens)


@dataclass(frozen=True)
class Resolved:
    """A description with all that it names looked up, once for a run."""

    spec: SimulationSpec
    hardware: Hardware
    limits: Limits
    num_blocks: int
    """KV blocks: those given, else what the memory holds beside weights and activations."""
    system: systems.System | None
    """The row; None for vLLM alone."""

    @property
    def reads_truth(self) -> bool:
        """Whether the system reads true output lengths."""
        sources = (self.spec.engine.options.get("prediction") or {}).get("sources") or ()
        return self.system is not None and (self.system.oracle or "oracle" in sources)


def resolve(spec: SimulationSpec) -> Resolved:
    """Look up what a description names.

    Raises:
        OSError: the model's configuration can't be read.
        ValueError: (ConfigError included) it is no such configuration, the model can't be split over the devices, the
            system is unknown, or the KV pool is too small for one request of ``max_model_len`` tokens, with which vLLM
            does not start.
    """
    engine, hardware = spec.engine, spec.hardware.resolve()
    limits = limits_of(engine, hardware)
    num_blocks = engine.num_blocks
    if num_blocks is None:
        tokens, seats = limits.max_num_batched_tokens, limits.max_num_seqs
        num_blocks = hardware.num_kv_blocks(engine.block_size, max_num_batched_tokens=tokens, max_num_seqs=seats)
    held_tokens = (num_blocks - 1) * engine.block_size
    if held_tokens < limits.max_model_len:
        raise ValueError(
            f"max_model_len={limits.max_model_len}: must fit into the KV cache, which holds {held_tokens} tokens "
            f"({num_blocks} blocks of {engine.block_size}, one of them reserved)"
        )
    system = None if engine.system in UPSTREAM else systems.resolve(engine.system)
    return Resolved(spec, hardware, limits, num_blocks, system)


def refused(field: str, value: object, allowed: str) -> ConfigError:
    """Return the error of a field of a description, by its dotted path."""
    return ConfigError(field, value, allowed, root="")


def with_values(spec: SimulationSpec, values: Mapping[str, Any]) -> SimulationSpec:
    """Return the description with other values at dotted paths; they are checked together, at the end.

    Raises:
        ConfigError: an unknown path, or a value that is not allowed there.
    """
    # What was not set stays so: defaults may depend on other fields, as the rate's does on the kind of arrivals.
    data = spec.model_dump(mode="json", exclude_unset=True)
    for path, value in values.items():
        *parents, last = path.split(".")
        inner = data
        for depth, name in enumerate(parents, start=1):
            if inner.get(name) is None:
                inner[name] = {}
            inner = inner[name]
            if not isinstance(inner, dict):
                raise refused(path, value, f"{'.'.join(parents[:depth])} is {inner!r} and has no fields of its own")
        inner[last] = value
    return parse(SimulationSpec, data)


def parse(model: type[Model], data: object) -> Model:
    """Build a description from plain data.

    Raises:
        ConfigError: the first thing that is wrong, with what is allowed.
    """
    return made(model, data, root="")


def _options_of(engine: EngineSpec) -> config.ExtConfig:
    return config.parse({**engine.options, "system": engine.system, "allow_oracle": True})


def _refuse_multiples(options: config.ExtConfig) -> None:
    try:
        systems.in_milliseconds(options.slo)
    except ConfigError as error:
        allowed = "needs step times that are known at start: add engine.profiled (--profiled) or name a profile's file"
        raise ConfigError(error.field, error.value, allowed) from error


def checked(spec: SimulationSpec) -> SimulationSpec:
    """Return a description whose system and options are known to fit each other.

    Options are dropped for vLLM's own schedulers, so that one description serves all systems of a comparison.

    Raises:
        ConfigError: the system is unknown, or refuses an option.
    """
    engine = spec.engine
    if engine.system in UPSTREAM:
        return spec.model_copy(update={"engine": engine.model_copy(update={"options": {}})})
    try:
        options = _options_of(engine)
        policies, sources = systems.build(options), options.prediction.sources
        if not engine.profiled and options.profile in (None, "auto"):
            _refuse_multiples(options)
        if spec.workload.announce == "predicted" and policies.use_predictions and config.RETRIEVAL not in sources:
            allowed = f"must name {config.RETRIEVAL!r} where workload.announce is 'predicted', or nobody listens"
            raise ConfigError("prediction.sources", sources, allowed)
    except ConfigError as error:
        field, allowed = f"engine.options.{error.field}", error.allowed
        if error.field == "system":
            field = "engine.system"
            rows = systems.known(unserved=True)
            if not all(part in rows for part in engine.system.split("+")):
                known = ", ".join((*UPSTREAM, *rows))
                allowed = f"must be one of {known}, or several of the latter joined by +"
        raise refused(field, error.value, allowed) from error
    return spec
