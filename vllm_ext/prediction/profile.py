"""Profiles: coefficients of the runtime model, measured once per model and hardware and kept in a file."""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_ext.config import ConfigError
from vllm_ext.envs import cache_dir
from vllm_ext.prediction.runtime import RuntimeModel

logger = logging.getLogger("vllm.vllm_ext.profile")

FORMAT = 1
AUTO = "auto"
"""Value of the ``profile`` option that stands for the file of this model on this hardware, if there is one."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A measured runtime model."""

    model: str
    device: str
    vllm_version: str
    coefficients: tuple[float, ...]
    """Five coefficients of RuntimeModel, in seconds per unit."""
    num_steps: int
    """Steps measured."""
    median_error: float
    """Median of |predicted - measured| / measured over steps that were not fitted."""
    p90_error: float


def hardware_name(device: str) -> str:
    """Return the device's name; for vLLM's plain ``cpu`` that of the processor, where the system tells it."""
    if device.lower() != "cpu":
        return device
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return device
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), device)


def default_path(model: str, device: str) -> Path:
    """Return where the profile of a model on a device is kept."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{model.strip('/')}--{device}").strip("-")
    return cache_dir() / "profiles" / f"{name[-200:]}.json"


def save(profile: Profile, path: Path) -> None:
    """Write a profile atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, **asdict(profile)}, file, indent=1)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(path: Path) -> Profile:
    """Read a profile.

    Raises:
        OSError: there is no such file, or it can't be read.
        ValueError: it is not a profile of this format.
    """
    raw: Any = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(raw, dict) or raw.pop("format", None) != FORMAT:
        raise ValueError(f"{path.name} is not a runtime profile of format {FORMAT}")
    try:
        profile = Profile(**{**raw, "coefficients": tuple(raw["coefficients"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path.name} lacks or has a wrong field: {error}") from error
    RuntimeModel(profile.coefficients)
    return profile


def load_runtime_model(option: str | None, model: str = "", device: str = "") -> RuntimeModel:
    """Return the runtime model that the ``profile`` option asks for; defaults where none is given.

    A damaged file of ours in the cache is reported, set aside with the suffix ``.damaged``, and the model starts from
    defaults and learns. A named file that is no profile may be somebody else's and is left alone.

    Raises:
        ConfigError: a file was named that does not exist, can't be read, or is no profile.
    """
    if option is None:
        return RuntimeModel()
    path = default_path(model, device) if option == AUTO else Path(option)
    try:
        return RuntimeModel(load(path).coefficients)
    except (OSError, ValueError) as error:
        if option != AUTO:
            allowed = f"a file written by `vllm-ext profile`, or {AUTO!r} ({error})"
            raise ConfigError("profile", option, allowed) from error
        if isinstance(error, OSError):
            logger.info("no runtime profile of %s on %s yet; `vllm-ext profile` measures one", model, device)
        else:
            _set_aside(path, error)
        return RuntimeModel()


def _set_aside(path: Path, damage: ValueError) -> None:
    aside = path.with_name(f"{path.name}.damaged")
    try:
        os.replace(path, aside)
    except OSError as error:  # a read-only place, or another engine core was quicker
        logger.error("the runtime profile %s is damaged (%s) and can't be set aside (%s)", path, damage, error)
    else:
        logger.error("the runtime profile %s is damaged (%s); set aside as %s", path, damage, aside)
