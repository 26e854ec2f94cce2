"""Settings of a file that `vllm-ext plan --save` wrote, applied to an engine before it starts."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.version import __version__ as vllm_version

from vllm_ext import __version__
from vllm_ext.config import AXES, KEY, ConfigError
from vllm_ext.config.tuned import Tuned, is_device, load

logger = logging.getLogger("vllm.vllm_ext.tuned")

_LIMITS = {"max_num_batched_tokens": None, "max_num_seqs": None, "watermark": 0.0, "kv_cache_dtype": "auto"}
"""Settings of vLLM's, and their values where the user gave none."""
_TOGETHER = frozenset({"max_num_batched_tokens", "max_num_seqs"})
"""Found together, and vLLM refuses more of the second than of the first: both are set or none."""
_OF_POLICIES = (*AXES, "policies")
_LEFT_OUT = "tuned_except"
_SAME_MEMORY = 0.1
"""Devices of one name differ by less in the memory that they show."""
_GIB = 1 << 30


def of(additional_config: object) -> Settings | None:
    """Return what ``--ext-tuned`` names; None if it was not given.

    Raises:
        ConfigError: The file can't be read, or is none; or it is told to leave out what it has not.
    """
    options = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    path = options.get("tuned") if isinstance(options, Mapping) else None
    if not (isinstance(options, Mapping) and isinstance(path, str) and path):
        return None
    left_out = options.get(_LEFT_OUT, ())
    if not isinstance(left_out, (list, tuple)) or not all(name in _LIMITS for name in left_out):
        raise ConfigError(_LEFT_OUT, left_out, f"must be a list of some of {', '.join(_LIMITS)}")
    return Settings(path, load(Path(path)), frozenset(left_out))


def note_given(arguments: Namespace, parse: Callable[[Namespace], object]) -> None:
    """Note in parsed arguments which settings were given by hand, which their values do not tell: some are defaults.

    Args:
        arguments: Without ``--ext-tuned`` nothing is changed.
        parse: Parses the same words again, into what it is given.
    """
    additional = getattr(arguments, "additional_config", None) or {}
    options = additional.get(KEY) or {} if isinstance(additional, Mapping) else None
    if not isinstance(options, Mapping) or not (getattr(arguments, "ext_tuned", None) or options.get("tuned")):
        return
    absent = object()
    parse(again := Namespace(**dict.fromkeys(_LIMITS, absent)))
    if given := [name for name in _LIMITS if getattr(again, name) is not absent]:
        options = {**options, _LEFT_OUT: [*(options.get(_LEFT_OUT) or ()), *given]}
        arguments.additional_config = {**additional, KEY: options}


@dataclass(frozen=True)
class Settings:
    """A file's."""

    path: str
    found: Tuned
    left_out: frozenset[str] = frozenset()
    """Names of vLLM's settings that were given by hand, whatever their values."""

    def chosen(self, scheduler_cls: object, additional_config: Mapping[str, Any]) -> tuple[object, dict[str, Any]]:
        """Return the scheduler and the additional configuration; what was given by hand wins.

        Options in the file belong to its system: beside another one they are left out.
        """
        wanted = self.found.settings
        options = {name: value for name, value in additional_config[KEY].items() if name not in ("tuned", _LEFT_OUT)}
        by_hand = _system(scheduler_cls, options)
        if by_hand is None:
            scheduler_cls = wanted.scheduler_cls
        if by_hand in (None, wanted.scheduler_cls):
            options = _over(wanted.options, options)
        others = {name: value for name, value in additional_config.items() if name != KEY}
        return scheduler_cls, {**others, KEY: options} if options or scheduler_cls else others

    @contextlib.contextmanager
    def applied(self, engine_args: Any) -> Iterator[None]:
        """Change an engine's arguments within the context, and say so."""
        before = {name: getattr(engine_args, name) for name in (*_LIMITS, "scheduler_cls", "additional_config")}
        scheduler_cls, additional = self.chosen(before["scheduler_cls"], before["additional_config"])
        limits = self._limits(before)
        for name, value in limits.items():
            setattr(engine_args, name, value)
        engine_args.scheduler_cls, engine_args.additional_config = scheduler_cls, additional
        told = self._told(before, {**before, **limits}, scheduler_cls, additional.get(KEY, {}))
        try:
            yield
        finally:
            logger.info("%s", told)  # now: vLLM sets logging up while the first engine's configuration is built
            for name, value in before.items():  # the caller may build from the same arguments again
                setattr(engine_args, name, value)

    def _limits(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return vLLM's settings that are to be set: none that was given by hand, nor one that goes with such a one."""
        wanted = {name: getattr(self.found.settings, name) for name in _LIMITS}
        by_hand = {
            name
            for name, default in _LIMITS.items()
            if (name in self.left_out or before[name] != default) and before[name] != wanted[name]
        }
        if by_hand & _TOGETHER:
            by_hand |= _TOGETHER
        return {name: value for name, value in wanted.items() if value is not None and name not in by_hand}

    def check(self, vllm_config: Any) -> None:
        """Compare the server with the one that the settings were found for.

        Raises:
            ConfigError: Its model, its device or the number of devices is another.
        """
        made_for, model, parallel = self.found.made_for, vllm_config.model_config, vllm_config.parallel_config
        sizes = {"num_hidden_layers": made_for.layers, "hidden_size": made_for.hidden}
        text = model.hf_text_config
        if any(getattr(text, name, value) != value for name, value in sizes.items()):
            raise self._refused(f"model {made_for.model}", f"{model.model}")
        self.check_devices(parallel.tensor_parallel_size)
        self._check_device()

    def check_devices(self, size: int) -> None:
        """Compare the number of devices, which a command line tells before anything starts.

        Raises:
            ConfigError: It is another.
        """
        if size != (wanted := self.found.made_for.tensor_parallel_size):
            raise self._refused(f"--tensor-parallel-size {wanted}", f"{size}")

    def _check_device(self) -> None:
        from vllm.platforms import current_platform

        wanted = self.found.made_for
        if current_platform.is_cpu() or wanted.device == "cpu":
            if not (current_platform.is_cpu() and wanted.device == "cpu"):
                raise self._refused(f"device {wanted.device}", current_platform.get_device_name() or "a CPU")
            return
        name, gib = current_platform.get_device_name(), current_platform.get_device_total_memory() / _GIB
        if not is_device(name, wanted.device) or abs(gib / wanted.device_memory_gib - 1) > _SAME_MEMORY:
            raise self._refused(
                f"device {wanted.device} of {wanted.device_memory_gib:.0f} GiB", f"{name}, {gib:.0f} GiB"
            )

    def _refused(self, wanted: str, found: str) -> ConfigError:
        return ConfigError("tuned", self.path, f"is for {wanted}, not for {found}; run vllm-ext plan for this server")

    def _told(
        self, before: Mapping[str, Any], now: Mapping[str, Any], scheduler_cls: object, options: Mapping[str, Any]
    ) -> str:
        """Return what is set, what is not, and what it should bring, which is known of all of it together."""
        wanted, measured = self.found.settings, self.found.measured
        set_here, left_out = list[str](), list[str]()
        for name in _LIMITS:
            if (value := getattr(wanted, name)) is not None:
                (set_here if now[name] == value else left_out).append(f"--{name.replace('_', '-')} {value}")
        if _system(scheduler_cls, options) != wanted.scheduler_cls:
            left_out.append(f"--scheduler-cls {wanted.scheduler_cls}" if wanted.scheduler_cls else "vLLM's scheduler")
        elif scheduler_cls != before["scheduler_cls"]:
            set_here.append(f"--scheduler-cls {scheduler_cls}")
        has, found = dict(_flat(options)), dict(_flat(wanted.options))
        for name, value in found.items():
            (set_here if has.get(name) == value else left_out).append(_shown(name, value))
        more = [_shown(name, has[name]) for name in has.keys() - found.keys() if name.partition(".")[0] in _OF_POLICIES]
        parts = [f"{self.path} sets {', '.join(set_here) or 'nothing'}"]
        parts += [f"because of what is given by hand it does not set {', '.join(left_out)}"] if left_out else []
        parts += [f"beside it {', '.join(sorted(more))} is given by hand"] if more else []
        parts.append(f"found by `{measured.command}` with step times of {measured.costs}")
        versions = ("vLLM", measured.vllm, vllm_version), ("vllm-ext", measured.vllm_ext, __version__)
        parts += [
            f"found with {package} {then}, this is {here}"
            for package, then, here in versions
            if then.partition("+")[0] != here.partition("+")[0]
        ]
        if left_out or more:
            return "; ".join([*parts, "what to expect is not known: it was measured with the file's settings alone"])
        parts += [
            f"expected at {one.load:g} of {measured.saturation_requests_per_s:.3g} requests/s: mean end-to-end latency "
            f"{one.mean_e2e:.2f} times lower ({one.mean_e2e_low:.2f}..{one.mean_e2e_high:.2f}), P99 {one.p99_e2e:.2f}"
            for one in self.found.expected
            if one.load in (0.9, 1.0)
        ]
        return "; ".join(parts)


def _shown(name: str, value: object) -> str:
    return f"{KEY}.{name}={json.dumps(value)}"


def _system(scheduler_cls: object, options: Mapping[str, Any]) -> object:
    """Return the system that is asked for; None: vLLM's scheduler."""
    return scheduler_cls or options.get("system") or ("fcfs" if options.get("policies") else None)


def _flat(options: Mapping[str, Any], below: str = "") -> Iterator[tuple[str, Any]]:
    """Yield options that are no objects, by their dotted names."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{below}{name}.")
        else:
            yield f"{below}{name}", value


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return options laid over others, objects within them likewise."""
    merged = copy.deepcopy(dict(below))
    for name, value in above.items():
        inner = merged.get(name)
        merged[name] = _over(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged
