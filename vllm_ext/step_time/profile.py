"""Profiles: coefficients of the runtime model, measured once per engine and hardware and kept in a file.

The file is JSON: a format number, the profile, and the SHA-256 of the profile. Its name and its content both say what
was measured (model, device, dtype, tensor-parallel size): a copied or renamed file gives itself away.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field, FiniteFloat, StrictBool, ValidationError
from pydantic.dataclasses import dataclass

from vllm_ext.config import ConfigError
from vllm_ext.envs import cache_dir
from vllm_ext.files import replaced, set_aside
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

    model: str = ""
    """Name or path, as given to the engine. Empty, as for the next two: not known, not compared."""
    device: str = ""
    """As `hardware_name` tells it."""
    dtype: str = ""
    """Of weights and computation, such as ``bfloat16``."""
    tensor_parallel_size: int = 1


_UNKNOWN = EngineKey()
_Count = Annotated[int, Field(ge=1, strict=True)]
_Error = Annotated[FiniteFloat, Field(ge=0, strict=True)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Profile:
    """A measured runtime model.

    Raises:
        ValueError: a field has no sense; the message names it.
    """

    model: str
    device: str
    dtype: str = ""
    """Empty: not known."""
    tensor_parallel_size: _Count = 1
    vllm_version: str
    coefficients: Coefficients
    num_steps: _Count
    """Steps measured."""
    median_error: _Error
    """Median of |predicted - measured| / measured over steps that were not fitted."""
    p90_error: _Error
    regimes: tuple[RegimeError, ...] = ()
    """The same, by kind of step."""
    terms: tuple[TermSupport, ...] = ()
    """What the steps said about each coefficient."""
    pivot_tokens: _Count | None = None
    """Tokens of the smallest step whose throughput nearly is the best (`vllm_ext.step_time.pivot_search`); None: not
    measured."""
    pivot_s: Annotated[FiniteFloat, Field(gt=0, strict=True)] | None = None
    """Its duration, in seconds."""
    pivot_saturated: StrictBool | None = None
    """False: throughput still rose up to the largest step, which is then taken for the pivot."""

    def __post_init__(self) -> None:
        Coefficients.checked(self.coefficients)
        if len({value is None for value in (self.pivot_tokens, self.pivot_s, self.pivot_saturated)}) > 1:
            raise ValueError("pivot_tokens, pivot_s, pivot_saturated: all of them must be given, or none")

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


def default_path(key: EngineKey) -> Path:
    """Return where the profile of an engine is kept."""
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:8]  # names that differ in odd characters only
    text = f"{key.model.strip('/')}--{key.device}--{key.dtype}--tp{key.tensor_parallel_size}"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")
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
        prices = tuple(fields["coefficients"][name] for name in Coefficients._fields)
        return Profile(**{**fields, "coefficients": prices})
    except ValidationError as error:
        first = error.errors()[0]
        wrong = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ValueError(f"{path.name} is damaged, or lacks or has a wrong field: {wrong}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name} is damaged, or lacks or has a wrong field: {error}") from error


def load_runtime_model(option: str | None, key: EngineKey = _UNKNOWN) -> RuntimeModel:
    """Return the runtime model that the ``profile`` option asks for; defaults where none is given.

    With ``auto`` nothing is refused: what can't be used is reported with the reason, and the model starts from
    defaults and learns. A damaged file in the cache is set aside; one of another format or of another engine is left
    alone. A named file is used whatever it was measured with, as the user asked for it, but a difference is reported.

    Args:
        option: None, ``auto``, or the path of a file.
        key: What the engine runs.

    Raises:
        ConfigError: a file was named that does not exist, can't be read, or is no profile of this format.
    """
    if option is None:
        return RuntimeModel()
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
    path = default_path(key)
    try:
        profile = load(path)
    except FileNotFoundError:
        logger.info("no runtime profile of %s yet; `vllm-ext profile` measures one", "; ".join(map(str, key)))
        return None
    except (OSError, OtherFormat) as error:
        logger.warning("the runtime profile in %s is ignored: %s", path.parent, error)
        return None
    except ValueError as error:
        set_aside(path, error, what="the runtime profile", instead="the model starts from defaults", logger=logger)
        return None
    if differences := _differences(profile.key, key):
        logger.warning("the runtime profile %s is ignored: %s", path, differences)
        return None
    logger.info("runtime profile %s, held-out error %.0f%% in the median", path, 100 * profile.median_error)
    return profile


def _differences(measured: EngineKey, engine: EngineKey) -> str:
    """Name every field in which the two differ, with both values; fields that the engine did not tell are skipped."""
    return "; ".join(
        f"{name}: the profile is of {of_file!r}, the engine has {of_engine!r}"
        for name, of_file, of_engine in zip(EngineKey._fields, measured, engine, strict=True)
        if of_engine != "" and of_file != of_engine
    )


def _digest(fields: Any) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
