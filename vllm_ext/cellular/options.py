"""Options of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from vllm_ext.cellular.scheduler import MAX_TASKS_TO_SUBMIT
from vllm_ext.config.errors import ConfigError
from vllm_ext.config.model import Flag, Options


class EngineOptions(Options):
    """How an engine serves."""

    root: ClassVar[str] = ""

    workers: Annotated[int, Flag()] = Field(default=1, ge=1)
    """Threads that compute; each is a worker of Algorithm 1."""
    max_requests: Annotated[int, Flag()] = Field(default=4096, ge=1)
    """Open requests beyond which new ones are refused, with status 503."""
    max_batch: Mapping[str, int] | None = None
    """Cell -> largest batch; by default as the model says, and on a CPU at most 128."""
    max_tasks_to_submit: Annotated[int, Flag()] = Field(default=MAX_TASKS_TO_SUBMIT, ge=1)
    """Tasks of a series that a worker takes at once."""
    order: Annotated[Literal["arrival", "slack"], Flag()] = "arrival"
    """Who goes first: by arrival, or by the least slack to the objective."""
    cells: Annotated[Literal["published", "alternate"] | None, Flag()] = None
    """Which cell goes next: published: as in BatchMaker's Algorithm 1, or alternate: in turns; None: in turns while
    fewer than two workers live."""
    max_restarts: int = Field(default=3, ge=0)
    """How often in a minute workers that died begin anew; the next one that dies stays dead."""
    device: str = "cpu"
    state_bytes: int = Field(default=4 << 30, ge=1)
    """How large values between cells may get."""
    step_s: Mapping[str, float] | None = None
    """Cell -> seconds of a task, for the order by slack; see `vllm-ext cellular profile`."""

    @model_validator(mode="after")
    def _a_device_has_one_worker(self) -> Self:
        if self.workers > 1 and self.device != "cpu":
            raise ConfigError(
                "workers", self.workers, f"must be 1 with device={self.device!r}, whose stream they share"
            )
        return self
