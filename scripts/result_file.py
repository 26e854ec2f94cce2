"""A file of benchmarks/results, as pages read it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from vllm_ext.report.provenance import RESULTS, measured_at

_WHERE_TO, _LOCAL = ("--out", "--keep", "--from"), ("--dataset", "--conversations")
"""Options that say where a benchmark writes, or wrote before, and those that name a file of the measuring machine."""


class Unshown(ValueError):
    """A result can't be shown; the message names the file, what is wrong and the remedy."""


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no figure")


class Result:
    """A result that a commit keeps.

    Raises:
        Unshown: there is no such file, or it is not a result.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        try:
            self.data: dict[str, Any] = json.loads((root / RESULTS / name).read_text(), parse_constant=_refused)
            if not isinstance(self.data, dict) or "goals" in self.data:
                raise ValueError("is no result, or one of an earlier version; measure it again")
            self.metrics: dict[str, float] = dict(self.data.get("metrics", {}))
            self.claims: list[dict[str, Any]] = list(self.data.get("claims", []))
            words = shlex.split(str(self.data.get("command", "")))
        except (OSError, TypeError, ValueError) as error:
            raise Unshown(f"{RESULTS / name} can't be read: {error}") from error
        pairs = [(word, before) for word, before in zip(words, ["", *words], strict=False)
                 if not {word, before} & {*_WHERE_TO}]  # fmt: skip
        self.command = shlex.join(Path(word).name if before in _LOCAL else word for word, before in pairs)
        """Without the options that say where it wrote, and without folders of the machine it ran on."""
        self.measured_at = measured_at(self.data)
        """Commit, and the day of it."""

    def value(self, row: str, metric: str, default: float | None = None) -> float:
        """Return a metric of a baseline, or of one of our systems.

        Raises:
            Unshown: the file does not have it, and there is no default.
        """
        baseline = self.data.get("baselines", {}).get(row, {})
        return self._number(baseline.get(metric, self.metrics.get(f"{row}.{metric}", default)), row, metric)

    def _number(self, found: Any, row: str, metric: str) -> float:
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise Unshown(
                f"{RESULTS / self.name} has no metric {metric!r} of {row!r}: measure it again "
                f"({self.command or 'no command recorded'}), or choose another headline in scripts/headlines.py"
            )
        return float(found)

    def compared(self, server: str, metric: str) -> float:
        """Return a metric of a server in a result of `vllm-ext compare`, whose first but the baseline has the metrics.

        Raises:
            Unshown: the file does not have it.
        """
        names = [*self.setting("servers")]
        values = self.metrics if names.index(server) == 2 else self.data["baselines"].get(server, {})
        return self._number(values.get(metric), server, metric)

    def setting(self, name: str) -> Any:
        """Return an entry of the configuration.

        Raises:
            Unshown: the file does not have it.
        """
        config = self.data.get("config", {})
        if name not in config:
            raise Unshown(f"{RESULTS / self.name} has no config {name!r}; run: {self.command}")
        return config[name]

    @property
    def machine(self) -> str:
        """Processor, cores, device and vLLM."""
        machine, versions = self.data.get("machine", {}), self.data.get("versions", {})
        cores = f"{machine.get('cpu_cores', '?')} cores of {str(machine.get('cpu', '?')).removesuffix(' Processor')}"
        return f"{machine.get('gpu', cores)}, vLLM {versions.get('vllm', '?')}"

    def check_ranks(self, effect: float, noise: float) -> None:
        """Refuse an effect that the noise of the run could have shown as well.

        Raises:
            Unshown: it is not larger than the distance of an A/A pair.
        """
        if effect <= noise:
            raise Unshown(
                f"{RESULTS / self.name} ranks nothing: the effect is {effect:.4g}, and its A/A pair differs by "
                f"{noise:.4g}; measure with more repeats, or choose another headline in scripts/headlines.py"
            )
