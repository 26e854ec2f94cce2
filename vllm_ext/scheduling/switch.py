"""What an administrator may change of a scheduler that runs: whose order counts, token budget, bounds of objectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from vllm.logger import init_logger

from vllm_ext.contract.objective import Slo

if TYPE_CHECKING:
    from vllm_ext.config.slo import SloConfig
    from vllm_ext.scheduling.engine_state import EngineState

logger = init_logger("vllm.vllm_ext.switch")

_BOUNDS = {"least_ttft_ms": "ttft_s", "least_tbt_ms": "tbt_s", "least_jct_ms": "e2e_s"}
_MS = 1000.0
_SHOWN_CHARS = 200
"""Of a name or a value that is not allowed."""


class Settings(BaseModel):
    """What can be changed; a change names some of it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    order: Literal["system", "arrival"] = "system"
    """``arrival``: from the next step on requests are served first come, first served, and no policy is asked."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a step at most; None: as the server was started."""
    least_ttft_ms: float = Field(default=0.0, ge=0)
    """New requests that ask for an earlier first token are scheduled as if they had asked for this."""
    least_tbt_ms: float = Field(default=0.0, ge=0)
    """The same for gaps between tokens."""
    least_jct_ms: float = Field(default=0.0, ge=0)
    """The same for the last token."""


class PolicySwitch:
    """The settings of a scheduler, and how often they were changed."""

    def __init__(self, engine: EngineState, config: SloConfig, reordered: Callable[[], None]) -> None:
        """Start as the server was started; ``reordered`` is called when another order counts."""
        self._engine, self._tokens, self._reordered = engine, engine.max_num_scheduled_tokens, reordered
        self.started = self.settings = Settings(**{name: getattr(config, name) for name in _BOUNDS})
        self.changes = 0

    @property
    def by_arrival(self) -> bool:
        """Whether no policy is asked."""
        return self.settings.order == "arrival"

    def change(self, wanted: Mapping[str, Any] | None) -> dict[str, Any]:
        """Change settings, all that are named or none of them.

        Args:
            wanted: New values by name; None: as the server was started.

        Returns:
            All settings, fit for JSON; or under ``problem`` what is wrong with a value.
        """
        try:
            now = self.started if wanted is None else self.settings
            settings = Settings.model_validate({**now.model_dump(), **(wanted or {})})
        except ValidationError as error:
            first = error.errors()[0]
            name, value = ".".join(map(str, first["loc"])), repr(first["input"])
            return {"problem": f"{name[:_SHOWN_CHARS]}={value[:_SHOWN_CHARS]}: {first['msg']}"}
        if problem := self._problem(settings):
            return {"problem": problem}
        if settings != self.settings:
            changed = {name: value for name, value in settings if value != getattr(self.settings, name)}
            logger.warning("an administrator changed the policy: %s", changed)
            self.settings = settings
            self.changes += 1
            if "order" in changed:
                self._reordered()
            self._engine.max_num_scheduled_tokens = settings.max_num_batched_tokens or self._tokens
        return {**settings.model_dump(), "max_num_batched_tokens": self._engine.max_num_scheduled_tokens}

    def bounded(self, slo: Slo) -> Slo:
        """Return a request's objectives, none below a bound that was raised; the front end keeps those of the start."""
        now, start = self.settings, self.started
        raised = {
            name: getattr(now, one) / _MS for one, name in _BOUNDS.items() if getattr(now, one) > getattr(start, one)
        }
        if not raised:
            return slo
        wanted = {name: getattr(slo, name) for name in _BOUNDS.values()}
        return Slo(**{name: value and max(value, raised.get(name, 0.0)) for name, value in wanted.items()})

    def state(self) -> dict[str, Any]:
        """Return what the metrics have, fit for JSON."""
        return {"by_arrival": self.by_arrival, "changes": self.changes}

    def _problem(self, settings: Settings) -> str | None:
        tokens, engine = settings.max_num_batched_tokens, self._engine
        least = engine.max_num_active_reqs * (1 + engine.num_spec_tokens)
        if tokens is not None and not engine.scheduler_config.enable_chunked_prefill:
            return (
                f"max_num_batched_tokens={tokens}: needs chunked prefill, without which a prompt must fit into a step"
            )
        if tokens is not None and not least <= tokens <= self._tokens:
            allowed = f"from {least}, a token for each seat, to {self._tokens}, with which the server was started"
            return f"max_num_batched_tokens={tokens}: must be {allowed}"
        for name in _BOUNDS:
            if (value := getattr(settings, name)) < (least_ms := getattr(self.started, name)):
                return f"{name}={value:g}: must be at least {least_ms:g}, slo.{name} of the start"
        return None
