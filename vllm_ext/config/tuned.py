"""A file of settings that `vllm-ext plan --save` found for a server, and `vllm serve --ext-tuned` applies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vllm_ext.config.errors import ConfigError
from vllm_ext.config.model import made
from vllm_ext.files import replaced


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class For(_Part):
    """The server that the settings are for."""

    model: str
    """As it was planned for: a name of the simulator's table, a folder or an id."""
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    """Sizes of the model, by which a server knows it under any name."""
    device: str
    device_memory_gib: float = Field(gt=0)
    tensor_parallel_size: int = Field(ge=1)


class Settings(_Part):
    """Flags of ``vllm serve``; None: as vLLM has it."""

    scheduler_cls: str | None = None
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    max_num_seqs: int | None = Field(default=None, ge=1)
    watermark: Annotated[float | None, Field(ge=0, lt=1)] = None
    kv_cache_dtype: Literal["fp8"] | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    """Of vllm-ext, as under ``vllm_ext`` in ``--additional-config``."""


class Measured(_Part):
    """By what they were found."""

    command: str
    trace: str
    trace_sha256: str
    costs: str
    """Where the step times came from: ``a cost model``, or a profile's name."""
    vllm: str
    vllm_ext: str
    saturation_requests_per_s: float
    """What the server carried without them."""


class Expected(_Part):
    """What they bring at a load, over the server without them; above 1 is better."""

    load: float
    """A multiple of the saturation."""
    mean_e2e: float
    mean_e2e_low: float
    mean_e2e_high: float
    """The ends of the 95 % interval."""
    p99_e2e: float
    p90_ttft: float


class Tuned(_Part):
    """The file."""

    format: Literal[1] = 1
    made_for: For
    settings: Settings
    measured: Measured
    expected: tuple[Expected, ...] = Field(strict=False)


def is_device(name: str, named: str) -> bool:
    """Whether a device's own name is one that the simulator's table calls ``named``; numbers of one may be any."""
    return "=" in named or re.search(rf"{named.partition('-')[0]}(?!\d)", name, re.IGNORECASE) is not None


def save(tuned: Tuned, path: Path) -> None:
    """Write the file.

    Raises:
        OSError: it can't be written.
    """
    with replaced(path) as file:
        file.write((tuned.model_dump_json(indent=1) + "\n").encode())


def load(path: Path) -> Tuned:
    """Read the file.

    Raises:
        ConfigError: it can't be read, or is none; the message names the file and what is wrong with it.
    """
    try:
        return made(Tuned, json.loads(path.read_text(encoding="utf-8")), root="")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("tuned", str(path), f"must be a file that vllm-ext plan --save wrote: {error}") from error
