"""Configuration of vllm-ext: typed, validated where it is built, and the `vllm serve` flags that set it.

The options live as a plain dictionary in ``VllmConfig.additional_config["vllm_ext"]``. `parse` turns it into an
`ExtConfig` and refuses what it does not know. Nothing here imports vLLM.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

KEY = "vllm_ext"
"""Key of our options in ``additional_config``."""

AXES = ("ordering", "admission", "budget", "residency")
"""The four policies of a system; each has a dictionary of parameters in `ExtConfig`."""

SOURCES = ("hint", "history", "oracle")
"""Where a length prediction may come from."""


class ConfigError(ValueError):
    """An option of vllm-ext is unknown or has a value that is not allowed.

    Attributes:
        field: Dotted name below ``vllm_ext``, such as ``prediction.window``; empty for the whole.
        value: The refused value.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        name = f"{KEY}.{field}" if field else KEY
        super().__init__(f"{name}={value!r}: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.allowed)


@dataclass(frozen=True, kw_only=True)
class PredictionConfig:
    """How the output length of a request is predicted."""

    sources: tuple[str, ...] = ("hint", "history")
    """Sources in order of preference; ``oracle`` only with ``allow_oracle``. The prior comes after all of them."""

    window: int = 1000
    """Finished requests that the length history remembers."""

    prior_tokens: int = 256
    """Output length assumed before any request finished, in tokens."""

    quantile: float = 0.5
    """Quantile of the history used as the prediction, greater than 0 and at most 1."""

    def __post_init__(self) -> None:
        _strings("prediction.sources", self.sources)
        for source in self.sources:
            if source not in SOURCES:
                raise ConfigError("prediction.sources", source, f"must be one of {', '.join(SOURCES)}")
        if len(set(self.sources)) != len(self.sources):
            raise ConfigError("prediction.sources", self.sources, "must name each source once")
        _integer("prediction.window", self.window, minimum=1)
        _integer("prediction.prior_tokens", self.prior_tokens, minimum=1)
        _number("prediction.quantile", self.quantile)
        if not 0 < self.quantile <= 1:
            raise ConfigError("prediction.quantile", self.quantile, "must be greater than 0 and at most 1")


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

    prediction: PredictionConfig = field(default_factory=PredictionConfig)
    """How output lengths are predicted."""

    modules: tuple[str, ...] = ()
    """Python modules imported first; they register further systems."""

    metrics_interval_s: float = 1.0
    """How often the front end fetches the scheduler's state, in seconds; 0 switches it off."""

    request_log: str | None = None
    """JSON-lines file that receives one line per finished request; written by the front end, never on the step path."""

    record_capacity: int = 4096
    """Records of finished requests kept for the front end to fetch."""

    profile: str | None = None
    """File written by ``vllm-ext profile`` from which the runtime model starts."""

    allow_oracle: bool = False
    """Offline benchmarks only: permits ``oracle-*`` systems, which see the true output length."""

    def __post_init__(self) -> None:
        _text("system", self.system)
        for axis in AXES:
            _parameters(axis, getattr(self, axis))
        if not isinstance(self.prediction, PredictionConfig):
            raise ConfigError("prediction", self.prediction, "must be a PredictionConfig")
        _strings("modules", self.modules)
        for module in self.modules:
            if not all(part.isidentifier() for part in module.split(".")):
                raise ConfigError("modules", module, "must be a dotted Python module name such as my_package.systems")
        _number("metrics_interval_s", self.metrics_interval_s)
        if self.metrics_interval_s < 0:
            raise ConfigError("metrics_interval_s", self.metrics_interval_s, "must be 0 (off) or a number of seconds")
        _integer("record_capacity", self.record_capacity, minimum=1)
        for name in ("request_log", "profile"):
            if getattr(self, name) is not None:
                _text(name, getattr(self, name))
        if self.request_log is not None and self.metrics_interval_s == 0:
            raise ConfigError("request_log", self.request_log, "needs metrics_interval_s greater than 0")
        if not isinstance(self.allow_oracle, bool):
            raise ConfigError("allow_oracle", self.allow_oracle, "must be true or false")
        if "oracle" in self.prediction.sources and not self.allow_oracle:
            allowed = "'oracle' needs allow_oracle=true, which is for offline benchmarks only"
            raise ConfigError("prediction.sources", self.prediction.sources, allowed)


def parse(raw: Mapping[str, Any]) -> ExtConfig:
    """Build the configuration from the dictionary under ``additional_config["vllm_ext"]``.

    Raises:
        ConfigError: ``raw`` has an unknown key or a value of the wrong type or range.
    """
    values = _known_keys("", raw, ExtConfig)
    if "modules" in values:
        values["modules"] = _tuple("modules", values["modules"])
    if "prediction" in values and not isinstance(values["prediction"], PredictionConfig):
        prediction = _known_keys("prediction", values["prediction"], PredictionConfig)
        if "sources" in prediction:
            prediction["sources"] = _tuple("prediction.sources", prediction["sources"])
        values["prediction"] = PredictionConfig(**prediction)
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
        raise ConfigError(name, value, "must be a list of strings")
    return tuple(value)


def _strings(name: str, value: Any) -> None:
    if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
        raise ConfigError(name, value, "must be a list of strings")


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(name, value, "must be a string that is not empty")


def _integer(name: str, value: Any, *, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(name, value, f"must be a whole number of at least {minimum}")


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(name, value, "must be a finite number")


def _parameters(axis: str, value: Any) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(axis, value, "must be an object of the policy's parameters by name")


def comma_list(text: str) -> list[str]:
    """Split ``a,b`` at its commas; blanks around an item and a trailing comma do not count."""
    return [item.strip() for item in text.split(",") if item.strip()]


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One command-line flag and the option it sets."""

    name: str
    """Flag as typed, such as ``--ext-levels``."""

    path: tuple[str, ...]
    """Keys below ``vllm_ext`` that lead to the option."""

    type: Callable[[str], Any]
    """Turns the text into a value; ``bool`` stands for a pair ``--x`` / ``--no-x`` without a text."""

    help: str
    """One sentence for ``--help``."""

    metavar: str | None = None
    """Placeholder of the text in ``--help``; not for ``bool``."""

    @property
    def dest(self) -> str:
        """Name of the attribute in the parsed arguments."""
        return self.name.removeprefix("--").replace("-", "_")


FLAGS: tuple[Flag, ...] = (
    Flag(
        name="--ext-age-limit-s",
        path=("ordering", "age_limit_s"),
        type=float,
        metavar="S",
        help="Seconds of waiting after which a request goes first, whatever its predicted length.",
    ),
    Flag(
        name="--ext-levels",
        path=("ordering", "num_levels"),
        type=int,
        metavar="N",
        help="Number of priority queues of the ordering policy.",
    ),
    Flag(
        name="--ext-base-level-s",
        path=("ordering", "base_level_s"),
        type=float,
        metavar="S",
        help="Predicted remaining time, in seconds, up to which a request belongs to the first queue.",
    ),
    Flag(
        name="--ext-preemption",
        path=("admission", "preempt"),
        type=bool,
        help="Whether a more urgent request may push out a running one.",
    ),
    Flag(
        name="--ext-prediction-sources",
        path=("prediction", "sources"),
        type=comma_list,
        metavar="A,B",
        help="Where length predictions come from, in order of preference: hint, history.",
    ),
    Flag(
        name="--ext-modules",
        path=("modules",),
        type=comma_list,
        metavar="M,N",
        help="Python modules imported first; they may register further systems.",
    ),
    Flag(
        name="--ext-request-log",
        path=("request_log",),
        type=str,
        metavar="FILE",
        help="JSON-lines file that receives one line per finished request.",
    ),
    Flag(
        name="--ext-metrics-interval-s",
        path=("metrics_interval_s",),
        type=float,
        metavar="S",
        help="Seconds between two readings of the scheduler's state for the metrics; 0 switches them off.",
    ),
    Flag(
        name="--ext-profile",
        path=("profile",),
        type=str,
        metavar="FILE",
        help="File written by `vllm-ext profile` from which the runtime model starts.",
    ),
)
"""Flags of `vllm serve` and `vllm bench`; each sets one option and wins over ``--additional-config``."""


def merge_flags(options: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` overlaid with the flags in ``given``; neither is changed.

    Args:
        options: The dictionary under ``additional_config["vllm_ext"]``.
        given: Parsed arguments by `Flag.dest`; absent or ``None`` means that the flag was not given.

    Raises:
        ConfigError: An option that must hold others, such as ``ordering``, is no object.
    """
    merged = copy.deepcopy(dict(options))
    for flag in FLAGS:
        value = given.get(flag.dest)
        if value is None:
            continue
        node = merged
        for depth, key in enumerate(flag.path[:-1], start=1):
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise ConfigError(".".join(flag.path[:depth]), node, "must be an object")
        node[flag.path[-1]] = value
    return merged
