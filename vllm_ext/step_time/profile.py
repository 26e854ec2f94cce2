"""Profiles: coefficients of the runtime model, measured once per engine and hardware and kept in a file.

The file is JSON: a format number, the profile, and the SHA-256 of the profile. Its name and its content both say what
was measured (model, device, dtype, tensor-parallel size): a copied or renamed file gives itself away.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ext.config import ConfigError
from vllm_ext.envs import cache_dir
from vllm_ext.observability.files import replaced
from vllm_ext.step_time.fit import RegimeError, TermSupport
from vllm_ext.step_time.runtime import Coefficients, Pivot, RuntimeModel

logger = logging.getLogger("vllm.vllm_ext.profile")

FORMAT = 3
"""Format 2 had no pivot, and is read as such. Format 1 had neither dtype nor tensor-parallel size, and another meaning
of two coefficients."""
_READABLE = (2, FORMAT)
AUTO = "auto"
"""Value of the ``profile`` option that stands for the file of this engine on this hardware, if there is one."""


class OtherFormat(ValueError):
    """A profile that another version of vllm-ext wrote."""


class EngineKey(NamedTuple):
    """What a profile was measured with; step times of one are no step times of another."""

    model: str
    """Name or path, as given to the engine."""
    device: str
    """As `hardware_name` tells it."""
    dtype: str
    """Of weights and computation, such as ``bfloat16``."""
    tensor_parallel_size: int


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A measured runtime model."""

    model: str
    device: str
    dtype: str = ""
    """Empty: not known."""
    tensor_parallel_size: int = 1
    vllm_version: str
    coefficients: Coefficients
    num_steps: int
    """Steps measured."""
    median_error: float
    """Median of |predicted - measured| / measured over steps that were not fitted."""
    p90_error: float
    regimes: tuple[RegimeError, ...] = ()
    """The same, by kind of step."""
    terms: tuple[TermSupport, ...] = ()
    """What the steps said about each coefficient."""
    pivot_tokens: int | None = None
    """Tokens of the smallest step whose throughput nearly is the best (`vllm_ext.step_time.pivot_search`); None: not
    measured."""
    pivot_s: float | None = None
    """Its duration, in seconds."""
    pivot_saturated: bool | None = None
    """False: throughput still rose up to the largest step, which is then taken for the pivot."""

    def __post_init__(self) -> None:
        for name in ("model", "device", "dtype", "vllm_version"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be a string")
        for name in ("tensor_parallel_size", "num_steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: must be a whole number of at least 1")
        for name in ("median_error", "p90_error"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value!r}: must be a finite number of at least 0")
        self._check_pivot()
        object.__setattr__(self, "coefficients", Coefficients.checked(self.coefficients))

    def _check_pivot(self) -> None:
        tokens, step_s, saturated = self.pivot_tokens, self.pivot_s, self.pivot_saturated
        if tokens is None and step_s is None and saturated is None:
            return
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise ValueError(f"pivot_tokens={tokens!r}: must be a whole number of at least 1, or all of pivot_* null")
        if isinstance(step_s, bool) or not isinstance(step_s, (int, float)) or not 0 < step_s < math.inf:
            raise ValueError(f"pivot_s={step_s!r}: must be a finite number greater than 0, or all of pivot_* null")
        if not isinstance(saturated, bool):
            raise ValueError(f"pivot_saturated={saturated!r}: must be true or false, or all of pivot_* null")

    @property
    def pivot(self) -> Pivot | None:
        """The step at which throughput saturates, if it was measured."""
        if self.pivot_tokens is None or self.pivot_s is None:
            return None
        return Pivot(self.pivot_tokens, self.pivot_s)

    @property
    def key(self) -> EngineKey:
        """What was measured."""
        return EngineKey(self.model, self.device, self.dtype, self.tensor_parallel_size)


def hardware_name(device: str) -> str:
    """Return the device's name; for vLLM's plain ``cpu`` that of the processor, where the system tells it."""
    if device.lower() != "cpu":
        return device
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return device
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), device)


def engine_key(vllm_config: Any, device: str) -> EngineKey:
    """Return what a profile of an engine is filed under.

    Args:
        vllm_config: vLLM's configuration of the engine.
        device: Name of the device, as the platform tells it.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    dtype = str(model.dtype).removeprefix("torch.")
    return EngineKey(str(model.model), hardware_name(device), dtype, int(parallel.tensor_parallel_size))


def default_path(model: str, device: str, dtype: str = "", tensor_parallel_size: int = 1) -> Path:
    """Return where the profile of an engine is kept: one file per `EngineKey`."""
    key = EngineKey(model, device, dtype, tensor_parallel_size)
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:8]  # names that differ in odd characters only
    name = _slug(f"{model.strip('/')}--{device}--{dtype}--tp{tensor_parallel_size}")
    return cache_dir() / "profiles" / f"{name[-180:]}-{digest}.json"


def save(profile: Profile, path: Path) -> None:
    """Write a profile atomically.

    Raises:
        OSError: it can't be written; a file that was there is as it was.
    """
    fields = {**asdict(profile), "coefficients": profile.coefficients._asdict()}
    text = json.dumps({"format": FORMAT, "sha256": _digest(fields), "profile": fields}, indent=1, allow_nan=False)
    with replaced(path) as file:
        file.write(text.encode())


def load(path: Path) -> Profile:
    """Read a profile.

    Raises:
        OSError: there is no such file, or it can't be read.
        OtherFormat: it is a profile of another format.
        ValueError: it is no profile, or damaged.
    """
    raw: Any = json.loads(path.read_text(encoding="utf-8"))
    found = raw.get("format") if isinstance(raw, dict) else None
    if isinstance(found, int) and not isinstance(found, bool) and found not in _READABLE:
        raise OtherFormat(f"{path.name} has format {found}, this version reads {FORMAT}: run `vllm-ext profile` again")
    if found not in _READABLE:
        raise ValueError(f"{path.name} is not a runtime profile of format {FORMAT}")
    try:
        fields, digest = raw["profile"], raw["sha256"]
        if digest != _digest(fields):
            raise ValueError("its content is not what its sha256 was made of")
        return Profile(
            **{
                **fields,
                "coefficients": tuple(fields["coefficients"][name] for name in Coefficients._fields),
                "regimes": tuple(RegimeError(**regime) for regime in fields["regimes"]),
                "terms": tuple(TermSupport(**term) for term in fields["terms"]),
            }
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name} is damaged, or lacks or has a wrong field: {error}") from error


def load_runtime_model(
    option: str | None, model: str = "", device: str = "", dtype: str = "", tensor_parallel_size: int = 1
) -> RuntimeModel:
    """Return the runtime model that the ``profile`` option asks for; defaults where none is given.

    With ``auto`` nothing stops the start: what can't be used is reported with the reason, and the model starts from
    defaults and learns. A damaged file in the cache is set aside with the suffix ``.damaged``; one of another format or
    of another engine is left alone. A named file is used whatever it was measured with, as the user asked for it, but
    a difference is reported.

    Args:
        option: None, ``auto``, or the path of a file.
        model: What the engine runs; see `EngineKey`. Empty: not known, not compared.
        device: The same.
        dtype: The same.
        tensor_parallel_size: The same.

    Raises:
        ConfigError: a file was named that does not exist, can't be read, or is no profile of this format.
    """
    if option is None:
        return RuntimeModel()
    key = EngineKey(model, device, dtype, tensor_parallel_size)
    if option == AUTO:
        profile = _find(key)
    else:
        profile = _read_named(option)
        if differences := _differences(profile.key, key):
            logger.warning("the runtime profile %s is used, but %s", option, differences)
    return RuntimeModel() if profile is None else RuntimeModel(profile.coefficients, pivot=profile.pivot)


def _read_named(option: str) -> Profile:
    try:
        return load(Path(option))
    except (OSError, ValueError) as error:
        allowed = f"a file written by `vllm-ext profile`, or {AUTO!r} ({error})"
        raise ConfigError("profile", option, allowed) from error


def _find(key: EngineKey) -> Profile | None:
    """Return the profile of the engine from the cache; None, with the reason logged, if there is none to use."""
    path = default_path(*key)
    try:
        profile = load(path)
    except FileNotFoundError:
        _tell_missing(key)
        return None
    except OSError as error:
        logger.warning("the runtime profile %s is ignored, it can't be read: %s", path, error)
        return None
    except OtherFormat as error:
        logger.warning("the runtime profile in %s is ignored: %s", path.parent, error)
        return None
    except ValueError as error:
        _set_aside(path, error)
        return None
    if differences := _differences(profile.key, key):
        logger.warning("the runtime profile %s is ignored: %s", path, differences)
        return None
    logger.info("runtime profile %s, held-out error %.0f%% in the median", path, 100 * profile.median_error)
    return profile


def _tell_missing(key: EngineKey) -> None:
    """Say that there is no profile, or only one of format 1, which had another name."""
    name = _slug(f"{key.model.strip('/')}--{key.device}")
    old = cache_dir() / "profiles" / f"{name[-200:]}.json"
    if old.exists():
        reason = "it has format 1, without dtype and tensor-parallel size: run `vllm-ext profile` again"
        logger.warning("the runtime profile %s is ignored: %s", old, reason)
    else:
        logger.info("no runtime profile of %s yet; `vllm-ext profile` measures one", _described(key))


def _differences(measured: EngineKey, engine: EngineKey) -> str:
    """Name every field in which the two differ, with both values; fields that the engine did not tell are skipped."""
    found = [
        f"{name}: the profile is of {of_file!r}, the engine has {of_engine!r}"
        for name, of_file, of_engine in zip(EngineKey._fields, measured, engine, strict=True)
        if of_engine != "" and of_file != of_engine
    ]
    return "; ".join(found)


def _described(key: EngineKey) -> str:
    parallel = f", tensor-parallel size {key.tensor_parallel_size}" if key.tensor_parallel_size > 1 else ""
    return f"{key.model} in {key.dtype or 'an unknown dtype'} on {key.device}{parallel}"


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")


def _digest(fields: Any) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _set_aside(path: Path, damage: ValueError) -> None:
    aside = path.with_name(f"{path.name}.damaged")
    try:
        os.replace(path, aside)
    except OSError as error:  # a read-only place, or another engine core was quicker
        logger.error("the runtime profile %s is damaged (%s) and can't be set aside (%s)", path, damage, error)
    else:
        logger.error("the runtime profile %s is damaged (%s); set aside as %s", path, damage, aside)
