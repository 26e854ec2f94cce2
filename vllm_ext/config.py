"""Configuration of vllm-ext: typed, validated where it is built, and the `vllm serve` flags that set it.

The options live as a plain dictionary in ``VllmConfig.additional_config["vllm_ext"]``. `parse` turns it into an
`ExtConfig` and refuses what it does not know. Nothing here imports vLLM.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_ext.config_attention import AttentionConfig
from vllm_ext.config_checks import KEY, ConfigError, boolean, integer, number, parameters, strings, text
from vllm_ext.config_flags import FLAGS, Flag, comma_list, merge_flags
from vllm_ext.config_kv import KvTierConfig
from vllm_ext.config_prediction import RETRIEVAL, SOURCES, PredictionConfig, PredictorConfig
from vllm_ext.config_slo import SloClass, SloConfig

__all__ = [
    "AXES",
    "FLAGS",
    "KEY",
    "RETRIEVAL",
    "SOURCES",
    "AttentionConfig",
    "ConfigError",
    "ExtConfig",
    "Flag",
    "KvTierConfig",
    "PredictionConfig",
    "PredictorConfig",
    "SloClass",
    "SloConfig",
    "comma_list",
    "merge_flags",
    "parse",
    "to_dict",
]

AXES = ("ordering", "admission", "budget", "residency", "sharing")
"""The five policies of a system; each has a dictionary of parameters in `ExtConfig`."""


@dataclass(frozen=True, kw_only=True)
class ExtConfig:
    """All options of vllm-ext; read-only, though its dictionaries are not enforced to be."""

    system: str = "fcfs"
    """Name of a system, or a composition such as ``fcfs+alise``."""

    ordering: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the system's ordering policy; checked when the system is built."""

    admission: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the system's admission policy; checked when the system is built."""

    budget: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the system's token budget policy; checked when the system is built."""

    residency: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the system's KV residency policy; checked when the system is built."""

    sharing: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the policy by which clients take turns; checked when the system is built."""

    prediction: PredictionConfig = field(default_factory=PredictionConfig)
    """How output lengths are predicted."""

    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    """The process that predicts them from prompts."""

    slo: SloConfig = field(default_factory=SloConfig)
    """Service-level objectives of requests that bring none, classes by tag, and load shedding."""

    kv_tier: KvTierConfig = field(default_factory=KvTierConfig)
    """KV blocks in host memory."""

    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """Which kernel computes attention."""

    modules: tuple[str, ...] = ()
    """Python modules imported first; they register further systems."""

    policies: tuple[str, ...] = ()
    """Policies of one's own, as ``my_policy.py:MyOrdering``; each takes its axis of the system."""

    metrics_interval_s: float = 1.0
    """How often the front end fetches the scheduler's state, in seconds; 0 switches it off."""

    request_log: str | None = None
    """JSON-lines file that receives one line per finished request; written by the front end, never on the step path."""

    record_capacity: int = 4096
    """Records of finished requests kept for the front end to fetch."""

    profile: str | None = None
    """File written by ``vllm-ext profile`` from which the runtime model starts."""

    seed: int = 0
    """Of the random numbers that policies draw."""

    allow_oracle: bool = False
    """Offline benchmarks only: permits ``oracle-*`` systems, which see the true output length."""

    def __post_init__(self) -> None:
        text("system", self.system)
        for axis in AXES:
            parameters(axis, getattr(self, axis))
        if not isinstance(self.prediction, PredictionConfig):
            raise ConfigError("prediction", self.prediction, "must be a PredictionConfig")
        if not isinstance(self.predictor, PredictorConfig):
            raise ConfigError("predictor", self.predictor, "must be a PredictorConfig")
        if not isinstance(self.slo, SloConfig):
            raise ConfigError("slo", self.slo, "must be a SloConfig")
        if not isinstance(self.kv_tier, KvTierConfig):
            raise ConfigError("kv_tier", self.kv_tier, "must be a KvTierConfig")
        if not isinstance(self.attention, AttentionConfig):
            raise ConfigError("attention", self.attention, "must be an AttentionConfig")
        strings("policies", self.policies)
        strings("modules", self.modules)
        for module in self.modules:
            if not all(part.isidentifier() for part in module.split(".")):
                raise ConfigError("modules", module, "must be a dotted Python module name such as my_package.systems")
        number("metrics_interval_s", self.metrics_interval_s)
        if self.metrics_interval_s < 0:
            raise ConfigError("metrics_interval_s", self.metrics_interval_s, "must be 0 (off) or a number of seconds")
        integer("record_capacity", self.record_capacity, minimum=1)
        integer("seed", self.seed, minimum=0)
        for name in ("request_log", "profile"):
            if getattr(self, name) is not None:
                text(name, getattr(self, name))
        if self.request_log is not None and self.metrics_interval_s == 0:
            raise ConfigError("request_log", self.request_log, "needs metrics_interval_s greater than 0")
        if self.slo.shed and self.metrics_interval_s == 0:
            raise ConfigError("slo.shed", self.slo.shed, "needs metrics_interval_s greater than 0")
        boolean("allow_oracle", self.allow_oracle)
        if "oracle" in self.prediction.sources and not self.allow_oracle:
            allowed = "'oracle' needs allow_oracle=true, which is for offline benchmarks only"
            raise ConfigError("prediction.sources", self.prediction.sources, allowed)


def parse(raw: Mapping[str, Any]) -> ExtConfig:
    """Build the configuration from the dictionary under ``additional_config["vllm_ext"]``.

    Raises:
        ConfigError: ``raw`` has an unknown key or a value of the wrong type or range.
    """
    values = _known_keys("", raw, ExtConfig)
    for name in ("modules", "policies"):
        if name in values:
            values[name] = _tuple(name, values[name])
    if "prediction" in values and not isinstance(values["prediction"], PredictionConfig):
        prediction = _known_keys("prediction", values["prediction"], PredictionConfig)
        if "sources" in prediction:
            prediction["sources"] = _tuple("prediction.sources", prediction["sources"])
        values["prediction"] = PredictionConfig(**prediction)
    if "predictor" in values and not isinstance(values["predictor"], PredictorConfig):
        values["predictor"] = PredictorConfig(**_known_keys("predictor", values["predictor"], PredictorConfig))
    if "slo" in values and not isinstance(values["slo"], SloConfig):
        values["slo"] = _slo(values["slo"])
    if "kv_tier" in values and not isinstance(values["kv_tier"], KvTierConfig):
        values["kv_tier"] = KvTierConfig(**_known_keys("kv_tier", values["kv_tier"], KvTierConfig))
    if "attention" in values and not isinstance(values["attention"], AttentionConfig):
        values["attention"] = AttentionConfig(**_known_keys("attention", values["attention"], AttentionConfig))
    for axis in AXES:
        if isinstance(values.get(axis), Mapping):
            values[axis] = copy.deepcopy(dict(values[axis]))
    return ExtConfig(**values)


def to_dict(config: ExtConfig) -> dict[str, Any]:
    """Return a dictionary fit for JSON with ``parse(to_dict(config)) == config``."""
    plain: dict[str, Any] = _plain(config)
    return plain


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _slo(raw: Any) -> SloConfig:
    slo = _slo_class("slo", raw, SloConfig)
    if isinstance(slo.get("classes"), Mapping):
        slo["classes"] = {
            name: value
            if isinstance(value, SloClass)
            else SloClass(**_slo_class(f"slo.classes.{name}", value, SloClass))
            for name, value in slo["classes"].items()
        }
    return SloConfig(**slo)


def _slo_class(where: str, raw: Any, cls: type) -> dict[str, Any]:
    found = _known_keys(where, raw, cls)
    if "ttft_bucket_ms" in found:
        found["ttft_bucket_ms"] = _tuple(f"{where}.ttft_bucket_ms", found["ttft_bucket_ms"])
    return found


def _known_keys(where: str, raw: Any, cls: type) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(cls)]
    if not isinstance(raw, Mapping):
        raise ConfigError(where, raw, "must be an object")
    for key in raw:
        if key not in names:
            path = f"{where}.{key}" if where else str(key)
            raise ConfigError(path, raw[key], f"unknown option; the options here are {', '.join(names)}")
    return dict(raw)


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(name, value, "must be a list")
    return tuple(value)
