"""Settings of a file that `vllm-ext plan --save` wrote, applied to an engine before it starts."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ext.config import KEY, ConfigError
from vllm_ext.config.tuned import Tuned, load

logger = logging.getLogger("vllm.vllm_ext.tuned")

_LIMITS = {"max_num_batched_tokens": None, "max_num_seqs": None, "watermark": 0.0, "kv_cache_dtype": "auto"}
"""Settings of vLLM's, and their values where the user gave none."""
_SAME_MEMORY = 0.1
"""Devices of one name differ by less in the memory that they show."""
_GIB = 1 << 30


def of(additional_config: object) -> Settings | None:
    """Return what ``--ext-tuned`` names; None if it was not given.

    Raises:
        ConfigError: The file can't be read, or is none.
    """
    options = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    path = options.get("tuned") if isinstance(options, Mapping) else None
    return Settings(path, load(Path(path))) if isinstance(path, str) and path else None


@dataclass(frozen=True)
class Settings:
    """A file's."""

    path: str
    found: Tuned

    def chosen(self, scheduler_cls: object, additional_config: Mapping[str, Any]) -> tuple[object, dict[str, Any]]:
        """Return the scheduler and the additional configuration; what was given by hand wins.

        Options in the file belong to its system: beside another one they are left out.
        """
        wanted = self.found.settings
        options = {name: value for name, value in additional_config[KEY].items() if name != "tuned"}
        by_hand = scheduler_cls or options.get("system") or ("fcfs" if options.get("policies") else None)
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
        set_here, by_hand = list[str](), list[str]()
        for name, default in _LIMITS.items():
            if (value := getattr(self.found.settings, name)) is not None:
                flag = f"--{name.replace('_', '-')} {value}"
                (by_hand if before[name] != default else set_here).append(flag)
                if before[name] == default:
                    setattr(engine_args, name, value)
        if scheduler_cls != before["scheduler_cls"]:
            set_here.append(f"--scheduler-cls {scheduler_cls}")
        engine_args.scheduler_cls, engine_args.additional_config = scheduler_cls, additional
        logger.info("%s", self._told(set_here, by_hand))
        try:
            yield
        finally:  # the caller may build from the same arguments again
            for name, value in before.items():
                setattr(engine_args, name, value)

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
        named = "=" in wanted.device or wanted.device.partition("-")[0].lower() in name.lower()
        if not named or abs(gib / wanted.device_memory_gib - 1) > _SAME_MEMORY:
            raise self._refused(
                f"device {wanted.device} of {wanted.device_memory_gib:.0f} GiB", f"{name}, {gib:.0f} GiB"
            )

    def _refused(self, wanted: str, found: str) -> ConfigError:
        return ConfigError("tuned", self.path, f"is for {wanted}, not for {found}; run vllm-ext plan for this server")

    def _told(self, set_here: list[str], by_hand: list[str]) -> str:
        measured, expected = self.found.measured, self.found.expected
        parts = [f"{self.path} sets {', '.join(set_here) or 'nothing'}"]
        if by_hand:
            parts.append(f"given by hand instead of {', '.join(by_hand)}")
        parts.append(f"found by `{measured.command}` with step times of {measured.costs}")
        parts += [
            f"expected at {one.load:g} of {measured.saturation_requests_per_s:.3g} requests/s: mean end-to-end latency "
            f"{one.mean_e2e:.2f} times lower ({one.mean_e2e_low:.2f}..{one.mean_e2e_high:.2f}), P99 {one.p99_e2e:.2f}"
            for one in expected
            if one.load in (0.9, 1.0)
        ]
        return "; ".join(parts)


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return options laid over others, objects within them likewise."""
    merged = copy.deepcopy(dict(below))
    for name, value in above.items():
        inner = merged.get(name)
        merged[name] = _over(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged
