"""Hardware and cost model of a simulation, as data."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class HardwareSpec(BaseModel):
    """Which model runs on which devices."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "opt-13b"
    """A name of the model table, or the folder of a Hugging Face ``config.json``."""
    device: str = "a100-40"
    """A name of the device table."""
    tensor_parallel: int = Field(default=1, ge=1)
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of the device's memory for weights, activations and KV."""
    kv_dtype_bytes: int = Field(default=2, ge=1, le=4)


class CostSpec(BaseModel):
    """Which cost model, and its parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["roofline", "fitted", "constant"] = "roofline"
    file: str | None = None
    """``fitted``: a profile written by ``vllm-ext profile``, or by ``vllm-ext validate --save-cost``."""
    step_s: float = Field(default=0.02, gt=0)
    """``constant``: what every step takes."""
    host_step_s: float = Field(default=0.0, ge=0)
    """Engine core's time per step beside the device, where the model does not know better."""
