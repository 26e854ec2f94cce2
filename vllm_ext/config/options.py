"""All options of vllm-ext: a dictionary in ``VllmConfig.additional_config["vllm_ext"]``, read into an `ExtConfig`.

Nothing here imports vLLM.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from vllm_ext.config.attention import AttentionConfig
from vllm_ext.config.errors import ConfigError
from vllm_ext.config.kv_tier import KvTierConfig
from vllm_ext.config.model import Flag, Options, Text, comma_list, made
from vllm_ext.config.prediction import PredictionConfig, PredictorConfig
from vllm_ext.config.slo import SloConfig

AXES = ("ordering", "admission", "budget", "residency", "sharing")
"""The five policies of a system; each has a dictionary of parameters in `ExtConfig`."""

ADMIN_POLICY, ADMIN_KV_TIER = "policy", "kv-tier"
"""Parts of the admin endpoint."""

HASH_BLOCK_TOKENS = 512
"""Prompt tokens that share one of the hash ids by which request logs and traces tell equal beginnings."""

_GAMMA = {"normalised": 0.25, "mean": 0.5, "tail": 1.0}
"""By what is to be short: how much waiting counts against cost."""


def _gamma(text: str) -> float:
    if text == "ttft":
        raise argparse.ArgumentTypeError("'ttft': is a system of its own, --scheduler-cls alise-ttft, with a KV tier")
    if text not in _GAMMA:
        raise argparse.ArgumentTypeError(f"{text!r}: must be one of {', '.join(_GAMMA)}")
    return _GAMMA[text]


def _module(name: str) -> str:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError("must be a dotted Python module name such as my_package.systems")
    return name


Parameters = Annotated[dict[str, Any], AfterValidator(copy.deepcopy)]
"""Of a policy, by name; a copy, so that whoever gave them may change theirs."""


class ExtConfig(Options):
    """All options of vllm-ext; read-only, though its dictionaries are not enforced to be."""

    system: Text = "fcfs"
    """Name of a system, or a composition such as ``fcfs+alise``."""

    shadow: Annotated[Text | None, Flag("--ext-shadow", metavar="SYSTEM")] = None
    """System whose order is tried in the background, without touching the one that serves. How long requests would have
    waited in it is counted in ``vllm_ext:shadow_*`` and logged once an hour. Its parameters are the defaults."""

    ordering: Annotated[
        Parameters,
        Flag(
            "--ext-age-limit-s",
            key="age_limit_s",
            type=float,
            metavar="S",
            help="Seconds of waiting after which the oldest requests go first, whatever their length or objective: one "
            "admission in four under alise and auto, one in ten under accelgen",
        ),
        Flag(
            "--ext-optimise --ext-optimize",
            key="gamma",
            type=_gamma,
            choices=_GAMMA,
            metavar="WHAT",
            help="Latency that alise and auto minimise: normalised (per token), mean (the default) or tail; for first "
            "tokens use --scheduler-cls alise-ttft",
        ),
    ] = Field(default_factory=dict)
    """Parameters of the system's ordering policy; checked when the system is built."""

    admission: Annotated[
        Parameters,
        Flag(
            "--ext-preemption",
            key="preempt",
            type=bool,
            help="Whether a more urgent request may preempt a running one",
        ),
    ] = Field(default_factory=dict)
    """Parameters of the system's admission policy; checked when the system is built."""

    budget: Parameters = Field(default_factory=dict)
    """Parameters of the system's token budget policy; checked when the system is built."""

    residency: Parameters = Field(default_factory=dict)
    """Parameters of the system's KV residency policy; checked when the system is built."""

    sharing: Annotated[
        Parameters,
        Flag(
            "--ext-share-by",
            key="by",
            type=str,
            metavar="WHAT",
            help="How fair tells clients apart: key (the default), tag, salt or adapter",
        ),
    ] = Field(default_factory=dict)
    """Parameters of the policy by which clients take turns; checked when the system is built."""

    prediction: PredictionConfig = PredictionConfig()
    """How output lengths are predicted."""

    predictor: PredictorConfig = PredictorConfig()
    """The process that predicts them from prompts."""

    slo: SloConfig = SloConfig()
    """Service-level objectives of requests that bring none, classes by tag, and load shedding."""

    kv_tier: KvTierConfig = KvTierConfig()
    """KV blocks in host memory."""

    attention: AttentionConfig = AttentionConfig()
    """Which kernel computes attention."""

    token_memory_mib: Annotated[int, Flag("--ext-token-memory", metavar="MIB")] = Field(default=0, ge=0)
    """Memory of each API server for the token ids of conversations, in MiB; 0: none. The history of a next turn keeps
    the ids that were generated, instead of being tokenised again."""

    response_store: Annotated[int, Flag("--ext-response-store", metavar="N")] = Field(default=0, ge=0)
    """Most responses that an API server keeps for ``previous_response_id``; 0: no limit, as in vLLM. The least recently
    used are dropped first. Needs VLLM_ENABLE_RESPONSES_API_STORE=1."""

    modules: Annotated[
        tuple[Annotated[str, AfterValidator(_module)], ...],
        Field(strict=False),
        Flag("--ext-modules", type=comma_list, metavar="M,N"),
    ] = ()
    """Python modules to import first, which may register further systems."""

    policies: Annotated[
        tuple[str, ...],
        Field(strict=False),
        Flag("--ext-policy", type=comma_list, metavar="FILE.py:CLASS", short="--policy"),
    ] = ()
    """Policies of your own, as ``my_policy.py:MyOrdering``. Each replaces the system's policy for the same question;
    without a system they are added to fcfs."""

    metrics_interval_s: Annotated[float, Flag("--ext-metrics-interval-s", metavar="S")] = Field(default=1.0, ge=0)
    """Seconds between two readings of the scheduler's state for the metrics; 0 switches them off."""

    admin: Annotated[bool, Flag("--ext-admin")] = False
    """Let administrators change policies, the token budget and bounds of objectives while the server runs, under
    `/vllm-ext/policy` with the key VLLM_EXT_ADMIN_KEY."""

    load_report: Annotated[bool, Flag("--ext-load-report")] = False
    """Tell routers under `/vllm-ext/load` how loaded each engine is and which conversations it holds, by hashes of
    their ids. It needs no key, like `/metrics`: keep both from clients."""

    request_log: Annotated[Text | None, Flag("--ext-request-log", metavar="FILE")] = None
    """JSON-lines file with one line for each finished request. The front end writes it, never a scheduler step."""

    request_log_mib: Annotated[int, Flag("--ext-request-log-mib", metavar="MIB")] = Field(default=100, ge=0)
    """Size in MiB at which the request log is rotated: ``FILE`` becomes ``FILE.1``. 0: never, for an external
    logrotate."""

    request_log_files: Annotated[int, Flag("--ext-request-log-files", metavar="N")] = Field(default=10, ge=1)
    """Number of rotated request logs to keep, ``FILE.1`` being the newest; older ones are deleted."""

    request_log_sample: Annotated[float, Flag("--ext-request-log-sample", metavar="SHARE")] = Field(
        default=1.0, gt=0, le=1
    )
    """Share of requests that are logged, above 0 and at most 1. Conversations are logged whole or not at all."""

    request_log_prompts: Annotated[bool, Flag("--ext-request-log-prompts")] = False
    """Add the token ids of prompts to the request log. Anybody who reads it can restore the text."""

    record_capacity: int = Field(default=4096, ge=1)
    """Number of records of finished requests kept for the front end to fetch."""

    profile: Annotated[Text | None, Flag("--ext-profile", metavar="FILE")] = None
    """File from `vllm-ext profile` with which the runtime model starts."""

    step_record: Annotated[Text | None, Flag("--ext-step-record", metavar="FILE")] = None
    """JSON-lines file with the contents and the duration of up to 20,000 steps, over all starts. `vllm-ext plan
    --profile FILE` learns this server's step times from it. A file of another engine is set aside."""

    tuned: Annotated[Text | None, Flag("--ext-tuned", metavar="FILE")] = None
    """Settings that `vllm-ext plan --save` found for this model on this device. What is given by hand wins."""

    tuned_except: tuple[Literal["max_num_batched_tokens", "max_num_seqs", "watermark", "kv_cache_dtype"], ...] = Field(
        default=(), strict=False
    )
    """Settings of the ``tuned`` file that are not applied. Only ``LLM(...)`` needs it, to keep one of them at vLLM's
    default."""

    seed: int = Field(default=0, ge=0)
    """Seed of the random numbers that policies draw."""

    allow_oracle: bool = False
    """Offline benchmarks only: permits ``oracle-*`` systems, which see the true output length."""

    @property
    def admin_parts(self) -> frozenset[str]:
        """Parts of the admin endpoint that were asked for."""
        wanted = {ADMIN_POLICY: self.admin, ADMIN_KV_TIER: self.kv_tier.admin}
        return frozenset(part for part, asked in wanted.items() if asked)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.request_log is None:
            for name in ("request_log_sample", "request_log_prompts"):
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    raise ConfigError(name, value, "needs request_log, the file")
        if self.request_log is not None and self.metrics_interval_s == 0:
            raise ConfigError("request_log", self.request_log, "needs metrics_interval_s greater than 0")
        if self.step_record is not None and self.metrics_interval_s == 0:
            raise ConfigError("step_record", self.step_record, "needs metrics_interval_s greater than 0")
        if self.slo.shed and self.metrics_interval_s == 0:
            raise ConfigError("slo.shed", self.slo.shed, "needs metrics_interval_s greater than 0")
        if "oracle" in self.prediction.sources and not self.allow_oracle:
            allowed = "'oracle' needs allow_oracle=true, which is for offline benchmarks only"
            raise ConfigError("prediction.sources", self.prediction.sources, allowed)
        return self


def parse(raw: Mapping[str, Any]) -> ExtConfig:
    """Build the configuration from the dictionary under ``additional_config["vllm_ext"]``.

    Raises:
        ConfigError: ``raw`` has an unknown key or a value of the wrong type or range.
    """
    return made(ExtConfig, dict(raw) if isinstance(raw, Mapping) else raw)


def to_dict(config: ExtConfig) -> dict[str, Any]:
    """Return a dictionary fit for JSON with ``parse(to_dict(config)) == config``."""
    return config.model_dump(mode="json")
