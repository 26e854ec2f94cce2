"""Hardware and cost model of a simulation, as data, and what is built of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from vllm_ext.config.errors import ConfigError
from vllm_ext.config.model import Flag
from vllm_ext.config.tuned import is_device
from vllm_ext.simulation.cost.devices import Device, find_device
from vllm_ext.simulation.cost.fitted import Fitted
from vllm_ext.simulation.cost.link import TransferLink
from vllm_ext.simulation.cost.model_shape import ModelShape
from vllm_ext.simulation.cost.models import find_model
from vllm_ext.simulation.cost.roofline import Roofline
from vllm_ext.simulation.cost.step_shape import CostModel
from vllm_ext.step_time.profile import EngineKey

_RUNTIME_BYTES = 512 << 20
"""CUDA context, libraries' workspaces and CUDA graphs of one device: vLLM's start-up log shows some 0.3 to 0.8 GiB."""
_MAX_TENSOR_PARALLEL = 64
_GIB = 1 << 30


class HardwareSpec(BaseModel):
    """Which model runs on which devices."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    model: Annotated[str, Flag(metavar="NAME|PATH|ID")] = "opt-13b"
    """A name of the model table, a folder with a Hugging Face ``config.json``, or an id whose configuration is in the
    local Hugging Face cache."""
    device: Annotated[str, Flag(metavar="NAME|NUMBERS")] = "a100-40"
    """A name of the device table, or memory=GiB,bandwidth=GB/s,flops=TFLOP/s,link=GB/s[,host_link=GB/s]."""
    tensor_parallel: Annotated[int, Flag("--tensor-parallel-size -tp")] = Field(default=1, ge=1)
    """Devices that share the model."""
    gpu_memory_utilization: Annotated[float, Flag()] = Field(default=0.9, gt=0, le=1)
    """Share of the device's memory for weights, activations and KV."""
    kv_dtype_bytes: int = Field(default=2, ge=1, le=4)
    weight_dtype_bytes: float | None = Field(default=None, gt=0, le=4)
    """Bytes per parameter; None: as the model table or the configuration says (2, unless quantised)."""
    kv_memory_bytes: int | None = Field(default=None, gt=0)
    """KV memory of each device, as with vLLM's ``--kv-cache-memory-bytes``; None: what the weights leave."""

    @field_validator("model")
    @classmethod
    def _model_is_known(cls, name: str) -> str:
        find_model(name)
        return name

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, name: str) -> str:
        return find_device(name).name

    def resolve(self) -> Hardware:
        """Look up the model's shape, with the weights' width as asked for, and the device.

        Raises:
            OSError: the model's configuration can't be read.
            ValueError: the configuration is none, or the model can't be split over ``tensor_parallel`` devices.
        """
        model = find_model(self.model)
        if self.weight_dtype_bytes is not None:
            model = replace(model, weight_bytes_per_parameter=self.weight_dtype_bytes)
        model.check_tensor_parallel(self.tensor_parallel)
        return Hardware(self, model, find_device(self.device))


class Hardware(NamedTuple):
    """What a `HardwareSpec` names."""

    spec: HardwareSpec
    model: ModelShape
    device: Device

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of one KV block of ``block_size`` tokens on one device."""
        return block_size * self.model.kv_bytes_per_token(self.spec.kv_dtype_bytes, self.spec.tensor_parallel)

    def num_kv_blocks(self, block_size: int, *, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """Return the KV blocks of ``block_size`` tokens that each device holds.

        blocks = floor((memory * utilisation - weights - activations) / (block_size * KV bytes per token)), per device;
        or floor(``kv_memory_bytes`` / block bytes), where the hardware gives it.

        Args:
            block_size: Tokens of a block, at least 1.
            max_num_batched_tokens: Tokens of the largest step, for the activations.
            max_num_seqs: Rows of the largest step that are sampled, for the logits.

        Raises:
            ValueError: not one block fits; the message says what is missing and over how many devices it would fit.
        """
        if block_size < 1:
            raise ValueError(f"block_size={block_size!r}: must be at least 1")
        spec, model, device = self
        block_bytes, given = self.kv_bytes_per_block(block_size), spec.kv_memory_bytes
        if given is not None:
            if given < block_bytes:
                raise ValueError(f"kv_memory_bytes={given!r}: one block needs {block_bytes} bytes")
            return given // block_bytes
        usable = device.memory_bytes * spec.gpu_memory_utilization

        def free(split: int) -> float:
            reserve = activation_bytes(model, max_num_batched_tokens, max_num_seqs, split)
            return usable - model.weight_bytes(split) - reserve

        split = spec.tensor_parallel
        if (found := free(split)) >= block_bytes:
            return int(found // block_bytes)
        larger = range(split + 1, _MAX_TENSOR_PARALLEL + 1)
        enough = next((more for more in larger if model.allows_tensor_parallel(more) and free(more) > 0), None)
        remedy = f"the smallest tensor_parallel that fits is {enough}" if enough else "no tensor_parallel is enough"
        raise ValueError(
            f"{model.name} does not fit on {spec.device} with tensor_parallel={split} and "
            f"gpu_memory_utilization={spec.gpu_memory_utilization}: {(block_bytes - found) / _GIB:.1f} GiB per device "
            f"are missing for weights ({model.weight_bytes(split) / _GIB:.1f} GiB), activations and one KV block; "
            f"{remedy}"
        )


class CostSpec(BaseModel):
    """Which cost model, and its parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    kind: Annotated[Literal["roofline", "fitted", "constant"], Flag("--cost")] = "roofline"
    """How long a step takes: by a model of the hardware, by a profile of it, or always the same."""
    file: Annotated[str | None, Flag("--cost-file --profile")] = None
    """``fitted``, which it implies: a profile by ``vllm-ext profile``, or by ``vllm-ext validate --save-cost``, or the
    steps of a server with ``--ext-step-record``."""
    step_s: float = Field(default=0.02, ge=1e-6)
    """``constant``: what every step takes."""
    host_step_s: float = Field(default=0.0, ge=0)
    """``fitted``, ``constant``: engine core's time per step beside the device. What was fitted to whole steps of a
    synchronous engine contains it already."""
    host_base_s: float = Field(default=541e-6, ge=0)
    """``roofline``: engine core's time per step. Source: a public fit to vLLM's engine core, together with the next."""
    host_per_request_s: float = Field(default=12.7e-6, ge=0)
    """``roofline``: engine core's time per step and request; vLLM 0.32's ``schedule()`` and ``update_from_output()``
    alone take 9 us of it."""
    gemm_efficiency: float | None = Field(default=None, gt=0, le=1)
    """``roofline``: share of the peak that matrix products reach; None, here and below: the device's default."""
    attention_efficiency: float | None = Field(default=None, gt=0, le=1)
    memory_efficiency: float | None = Field(default=None, gt=0, le=1)
    """``roofline``: share of the memory's bandwidth that streaming kernels reach, reads of KV among them."""
    weight_efficiency: float | None = Field(default=None, gt=0, le=1)
    """``roofline``: share of it at which matrix products read their weights."""
    link_efficiency: float | None = Field(default=None, gt=0, le=1)
    unhidden: float | None = Field(default=None, ge=0, le=1)
    """``roofline``: share of the shorter of compute and weight traffic that is not hidden behind the longer."""
    cuda_graphs: bool = True
    """``roofline``: whether decode-only steps are launched as one graph; False: ``--enforce-eager``."""
    pcie_bytes_per_s: float | None = Field(default=None, gt=0)
    """Host link of each device, in one direction; None: the device's default."""
    pcie_contention_loss: float = Field(default=0.19, ge=0, lt=1)
    """Share of its rate a direction loses while both are busy. Source: Pensieve, 18-20 %."""
    copy_overhead_s: float = Field(default=5e-6, ge=0)
    """Fixed time of each copy over the host link: an asynchronous copy's launch, assumed."""
    quantise_bytes_per_s: float | None = Field(default=None, gt=0)
    """Rate at which a device's KV is turned into 8 bits and back, in bytes of KV as the device holds it, one after the
    other with the copy of a ``kv_tier`` of 8 bits; None: all of it is hidden behind the copies."""

    @model_validator(mode="after")
    def _fields_belong_to_the_kind(self) -> CostSpec:
        if (self.kind == "fitted") != (self.file is not None):
            raise ValueError(f"file={self.file!r}: needed by kind='fitted' and by no other; kind is {self.kind!r}")
        if self.kind == "roofline" and self.host_step_s:
            raise ValueError(f"host_step_s={self.host_step_s!r}: kind='roofline' takes host_base_s instead")
        return self

    def apply(self, device: Device) -> Device:
        """Return the device with the efficiencies that are given here."""
        names = (
            "gemm_efficiency", "attention_efficiency", "memory_efficiency", "weight_efficiency", "link_efficiency",
            "unhidden",
        )  # fmt: skip
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.pcie_bytes_per_s is not None:
            given["pcie_bytes_per_s"] = self.pcie_bytes_per_s
        if not self.cuda_graphs:
            given["graph_max_requests"] = 0
        return replace(device, **given)


def build(hardware: Hardware, cost: CostSpec) -> CostModel:
    """Return the cost model that is asked for.

    Raises:
        ConfigError: a file that is named can't be read, or is damaged.
    """
    if cost.kind == "constant":
        return Fitted.constant(cost.step_s, cost.host_step_s)
    if cost.file is not None:
        return _read(cost.file, cost.host_step_s)
    return Roofline(
        hardware.model,
        cost.apply(hardware.device),
        hardware.spec.tensor_parallel,
        kv_dtype_bytes=hardware.spec.kv_dtype_bytes,
        host_base_s=cost.host_base_s,
        host_per_request_s=cost.host_per_request_s,
    )


def notes(hardware: HardwareSpec | None, cost: CostSpec) -> list[str]:
    """Return what a reader should know of step times that a file tells, a line each; none without a file.

    Args:
        hardware: What is simulated; None: whatever was measured.
        cost: With the file.

    Raises:
        ConfigError: It can't be read, or is damaged.
    """
    if cost.file is None:
        return []
    found = _read(cost.file, cost.host_step_s)
    engine, quality, name = found.engine, found.quality, Path(cost.file).name
    about = ["nothing is known of its fit"]
    if quality is not None:
        split = f", tensor-parallel size {engine.tensor_parallel_size}" if engine.tensor_parallel_size > 1 else ""
        about = [
            f"{quality.num_steps} steps of {quality.source or 'an engine that it does not name'}{split}",
            f"error over steps held out {quality.median_error:.1%} in the median, {quality.p90_error:.1%} in the P90",
        ]
    lines = [f"step times of {name}: {'; '.join([*about, *found.notes])}"]
    if hardware is not None and (differences := _differences(hardware, engine)):
        lines.append(f"step times of {name} are of another server than is simulated: {differences}")
    return lines


def _differences(hardware: HardwareSpec, measured: EngineKey) -> str:
    """Return in what a server differs from the one measured, where both are known: a name may be part of the other."""
    if not measured.model:
        return ""
    names = [name.rstrip("/").rpartition("/")[2].lower() for name in (measured.model, hardware.model)]
    split = hardware.tensor_parallel
    pairs = {
        "model": (names[0] in names[1] or names[1] in names[0], measured.model, hardware.model),
        "device": (hardware.device == "cpu" or is_device(measured.device, hardware.device), measured.device,
                   hardware.device),
        "tensor-parallel size": (measured.tensor_parallel_size == split, measured.tensor_parallel_size, split),
    }  # fmt: skip
    return "; ".join(f"{what} {was}, not {now}" for what, (same, was, now) in pairs.items() if not same)


def _read(file: str, host_step_s: float) -> Fitted:
    try:
        return Fitted.load(Path(file), host_step_s)
    except (OSError, ValueError) as error:
        raise ConfigError("cost.file", file, str(error), root="") from error


def build_link(hardware: Hardware, cost: CostSpec) -> TransferLink:
    """Return the link between each device and the host, idle at time 0.

    Every device of a tensor-parallel group has its own and moves its share: submit the bytes of one device, those of
    `ModelShape.kv_bytes_per_token` with ``tensor_parallel``.
    """
    device = cost.apply(hardware.device)
    return TransferLink(device.pcie_bytes_per_s, cost.pcie_contention_loss, cost.copy_overhead_s)


def activation_bytes(
    model: ModelShape, max_num_batched_tokens: int, max_num_seqs: int, tensor_parallel: int = 1
) -> float:
    """Return the bytes a device needs beside weights and KV.

    The largest step's hidden states (residual, input, output: 3 * hidden) with the widest of the projections (query,
    key and value, the feed-forward block's, or the experts', in and out) in 2 bytes; logits of all sampled rows twice
    in fp32; and a fixed part of 0.5 GiB.
    """
    widest = model.widest_activation(tensor_parallel)
    hidden = max_num_batched_tokens * (3 * model.hidden + widest) * 2
    return _RUNTIME_BYTES + hidden + 8 * max_num_seqs * model.vocab
