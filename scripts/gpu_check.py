#!/usr/bin/env python3
"""Check this checkout on a machine with a GPU, and measure there what only a GPU can tell, in eight minutes.

    python3 scripts/gpu_check.py --out results                        # where vLLM and vllm-ext are installed
    python3 scripts/gpu_check.py --out results --bundle .gpu/vllm.tar.xz      # where neither is: see gpu_bundle.py
    python3 scripts/gpu_check.py --dry-run                            # without a GPU: imports, arguments, report

The parts are in order of value; each has a limit, and what is left of the time goes to those that come first. Commands
are processes of their own. The folder gets a JSON file for each part, the runtime profile, and after every part a
summary: eight files. ``VLLM_EXT_COMMIT`` names the commit where there is no git repository. Needs the standard library,
PyTorch and Triton. Exit status 0: all is well; 1: what was computed is wrong; 3: a part failed or was left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_site

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_BUNDLE = ROOT / ".gpu" / "vllm.tar.xz"
DONE, WRONG, FAILED = 0, 1, 3
"""Exit statuses; those of commands as well."""
PROFILE = "profile.json"
MODULES = {
    "vllm": "vLLM is not here: bring the bundle of scripts/gpu_bundle.py",
    "pytest": "pytest is not here",
}
"""Modules that commands need, and what to say where one is missing."""
_LEAST_S = 15.0
"""A part is not begun with less."""
_TAIL_CHARS = 2500
Found = dict[str, Any]
"""What became of a command: its exit status, seconds, result, and the end of what it printed if it failed."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One process.

    ``{out}`` among its arguments stands for the JSON file that it writes, which is read even if it is ended early, and
    ``{folder}`` for the folder of its part's files, which have the names of commands. A command without ``{out}``
    prints its result as its last line.
    """

    name: str
    arguments: tuple[str, ...]
    needs: str = "vllm"
    """A module that has to be importable, besides PyTorch and Triton; empty: none."""
    at_once: bool = False
    """Run beside the others of its part that are, before the rest: mostly compiles, and is not timed."""
    background: bool = False
    """Goes on beside later parts: it leaves the device alone, and needs few processors."""

    @property
    def dry(self) -> tuple[str, ...]:
        """Return what tries its imports and its arguments: scripts without a command line are only loaded."""
        script, *options = self.arguments
        if script == "-m":
            return (*self.arguments, "--collect-only")
        if not options or options[0] == "cuda":
            return ("-c", f"import runpy; runpy.run_path({script!r}, run_name='dry run')")
        return (script, *options, "--help")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Commands that make one file."""

    name: str
    limit_s: float
    """Of all its commands together."""
    commands: tuple[Command, ...]


def benchmark(name: str, script: str, *options: str, needs: str = "vllm", background: bool = False) -> Command:
    """Return a command that writes its result."""
    arguments = (f"benchmarks/{script}", "--out", "{out}", *options)
    return Command(name=name, arguments=arguments, needs=needs, background=background)


def check(name: str, *arguments: str, needs: str = "") -> Command:
    """Return a command that compares kernels with their definition."""
    return Command(name=name, arguments=arguments, needs=needs, at_once=True)


TESTS = ("-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider")
PARTS = (
    Part(
        name="right",
        limit_s=130.0,
        commands=(
            check("attention", "tests/kernels/paged_attention/gpu_script.py", "cuda"),
            check("quantisation", "tests/kernels/gpu_script.py", "cuda"),
            check("copies", "tests/kv/cuda_codec_script.py", "cuda"),
            check("tests", *TESTS, "tests/kv/test_cuda_gpu.py", "tests/cellular/test_graphed.py", needs="pytest"),
            benchmark("engines", "gpu_right.py", "--limit-s", "45"),
        ),
    ),
    Part(
        name="token_budget",
        limit_s=205.0,
        commands=(
            benchmark("measured", "gpu_budget.py", "--profile", f"{{folder}}/{PROFILE}"),
            benchmark("simulated", "gpu_budget.py", "--simulate", "{folder}/measured.json", background=True),
        ),
    ),
    Part(
        name="swap",
        limit_s=75.0,
        commands=(
            benchmark("copies", "kv_tier_cuda.py", "--quick", needs=""),
            benchmark("returning", "gpu_return.py", "--limit-s", "40"),
        ),
    ),
    Part(
        name="attention",
        limit_s=50.0,
        commands=(benchmark("kernels", "attention_gpu.py", "--quick", needs=""),),
    ),
    Part(name="decode", limit_s=90.0, commands=(benchmark("steps", "gpu_decode.py", "--quick", "--limit-s", "40"),)),
    Part(name="conversations", limit_s=90.0, commands=(benchmark("int8", "gpu_talks.py", "--limit-s", "40"),)),
)


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs commands.

    Args:
        environment: Of the processes.
        modules: Of `MODULES`, those that they can import.
        scratch: For the files that they write.
        dry: Try imports and arguments only.
    """

    environment: Mapping[str, str]
    modules: frozenset[str]
    scratch: Path
    dry: bool

    def obstacle(self, command: Command) -> str | None:
        """Return why a command can't be run; None: it can."""
        return None if command.needs in {"", *self.modules} else MODULES[command.needs]

    def run(self, part: Part, command: Command, limit_s: float) -> Found:
        """Run a command to its end, or to its limit."""
        if reason := self.obstacle(command):
            return {"left out": reason}
        return self.ended(part, command, *self.start(part, command), limit_s)

    def start(self, part: Part, command: Command) -> tuple[subprocess.Popen[str], float]:
        """Start a command; return its process, and when it began."""
        self.folder(part).mkdir(exist_ok=True)
        texts = {"{out}": str(self._file(part, command)), "{folder}": str(self.folder(part))}
        arguments = [_filled(argument, texts) for argument in (command.dry if self.dry else command.arguments)]
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **self.environment}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        return process, time.monotonic()

    def ended(
        self, part: Part, command: Command, process: subprocess.Popen[str], began: float, limit_s: float
    ) -> Found:
        """Wait for a command's end, or end it at its limit; return what it wrote."""
        try:
            stdout, stderr = process.communicate(timeout=max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
        found: Found = {"status": process.returncode, "seconds": round(time.monotonic() - began, 1)}
        if process.returncode != DONE:
            found["tail"] = (stdout[-_TAIL_CHARS // 2 :] + stderr[-_TAIL_CHARS:]).strip()
        path = self._file(part, command)
        with contextlib.suppress(OSError, ValueError):
            found["result"] = json.loads(path.read_text() if path.exists() else (stdout.splitlines() or [""])[-1])
        return found

    def folder(self, part: Part) -> Path:
        """Return where the commands of a part write."""
        return self.scratch / part.name

    def _file(self, part: Part, command: Command) -> Path:
        return self.folder(part) / f"{command.name}.json"


@dataclass(frozen=True, kw_only=True)
class Check:
    """Runs parts within a time, and writes what they found.

    Args:
        runner: Of their commands.
        out: Receives the files; None: nothing is written.
        about: What every file says of commit and machine.
        total_s: For all parts.
    """

    runner: Runner
    out: Path | None
    about: Mapping[str, Any]
    total_s: float
    found: dict[str, dict[str, Found]] = field(default_factory=dict)
    """By part and command."""
    _began: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds that are left of the time."""
        return self.total_s - (time.monotonic() - self._began)

    def run(self, parts: Sequence[Part]) -> None:
        """Run parts in their order; what goes on in the background is waited for at the end."""
        behind: list[tuple[Part, Command, subprocess.Popen[str], float]] = []
        for part in parts:
            if self.left_s < _LEAST_S:
                self._note(part, {command.name: {"left out": "no time is left"} for command in part.commands})
                continue
            self._note(part, self._run(part))
            behind.extend(
                (part, command, *self.runner.start(part, command))
                for command in part.commands
                if command.background and self.runner.obstacle(command) is None
            )
        for part, command, process, began in behind:
            self._note(part, {command.name: self.runner.ended(part, command, process, began, self.left_s)})

    def _run(self, part: Part) -> dict[str, Found]:
        end = time.monotonic() + min(part.limit_s, self.left_s)
        commands = [command for command in part.commands if not command.background]
        first = [command for command in commands if command.at_once]
        with ThreadPoolExecutor(max(1, len(first))) as pool:
            limit_s = end - time.monotonic()
            results = pool.map(lambda command: self.runner.run(part, command, limit_s), first)
            found = {command.name: result for command, result in zip(first, results, strict=True)}
        for command in commands:
            if not command.at_once:
                found[command.name] = self.runner.run(part, command, end - time.monotonic())
        return found

    def _note(self, part: Part, results: Mapping[str, Found]) -> None:
        """Add results to those of a part, and write its file and the summary."""
        self.found.setdefault(part.name, {}).update(results)
        for name, result in results.items():
            words = ", ".join(f"{key} {value}" for key, value in _short(result).items())
            print(f"{part.name:14} {name:14} {words}", file=sys.stderr, flush=True)
        if self.out is None:
            return
        _write(self.out / f"{part.name}.json", {"part": part.name, **self.about, "runs": self.found[part.name]})
        if (profile := self.runner.folder(part) / PROFILE).exists():
            shutil.copyfile(profile, self.out / PROFILE)
        short = {
            name: {command: _short(result) for command, result in runs.items()} for name, runs in self.found.items()
        }
        _write(self.out / "summary.json", {**self.about, "seconds_left": round(self.left_s), "parts": short})

    def status(self) -> int:
        """Return the exit status; of a try without vLLM what needs it may be left out."""
        results = [result for runs in self.found.values() for result in runs.values()]
        statuses = {result.get("status", DONE if self.runner.dry else FAILED) for result in results} - {DONE}
        return DONE if not statuses else WRONG if statuses == {WRONG} else FAILED


def asked(environment: Mapping[str, str]) -> tuple[dict[str, Any], frozenset[str]]:
    """Ask a process with these variables what is there.

    Returns:
        Versions of PyTorch and Triton and the name of the ``gpu``, if there is one; and the modules of `MODULES`.

    Raises:
        SiteError: PyTorch or Triton does not import.
    """
    text = f"""
import importlib.util, json, torch, triton
facts = {{"torch": torch.__version__, "triton": triton.__version__}}
if torch.cuda.is_available():
    facts["gpu"] = torch.cuda.get_device_name()
print(json.dumps([facts, [name for name in {[*MODULES]} if importlib.util.find_spec(name)]]))
"""
    variables = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", text], env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise gpu_site.SiteError(f"PyTorch or Triton does not import: {done.stderr.strip().splitlines()[-1]}")
    facts, modules = json.loads(done.stdout.splitlines()[-1])
    return facts, frozenset(modules)


def commit() -> str:
    """Return the commit that results are of: of the environment, else of the git repository, else ``unknown``."""
    if given := os.environ.get("VLLM_EXT_COMMIT"):
        return given
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def environment(bundle: Path | None, folder: Path) -> dict[str, str]:
    """Return the variables of commands.

    Args:
        bundle: Of vLLM; None: an installed one is used, or none.
        folder: For what is laid out.

    Raises:
        SiteError: the bundle is not there, or damaged.
    """
    found = gpu_site.lay_out(bundle, ROOT, folder)
    if bundle is None and importlib.util.find_spec("vllm_ext") is None:
        ours = gpu_site.install(ROOT, folder / "vllm-ext")
        found |= {"PYTHONPATH": os.pathsep.join(map(str, (ours, ROOT / "benchmarks"))), "PYTHONSAFEPATH": "1"}
    if "PYTHONPATH" in found:
        found["PYTHONPATH"] += f"{os.pathsep}{ROOT}"  # for tests
    return {**found, "VLLM_EXT_COMMIT": commit()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    out, bundle = os.environ.get("OUT"), os.environ.get("BUNDLE")
    parser.add_argument("--out", type=Path, default=out and Path(out), help="folder of the results (default: $OUT)")
    parser.add_argument("--bundle", type=Path, default=bundle and Path(bundle), help="of gpu_bundle.py (default: "
                        "$BUNDLE, or .gpu/vllm.tar.xz where vLLM is not installed)")  # fmt: skip
    parser.add_argument("--parts", default=",".join(names), help="of them, in order (default: %(default)s)")
    parser.add_argument("--total-s", type=float, default=470.0, help="for all parts (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="try imports, arguments and the report without a GPU")
    args = parser.parse_args(argv)
    if unknown := set(args.parts.split(",")) - set(names):
        parser.error(f"--parts={args.parts}: {', '.join(sorted(unknown))} unknown, must be of {', '.join(names)}")
    if args.out is None and not args.dry_run:
        parser.error("--out=: must be the folder of the results, or set $OUT")
    if args.bundle is None and importlib.util.find_spec("vllm") is None and DEFAULT_BUNDLE.exists():
        args.bundle = DEFAULT_BUNDLE
    folder = Path(tempfile.gettempdir(), "vllm-ext-site")  # stays: a second run unpacks nothing
    try:
        variables = environment(args.bundle, folder)
        facts, modules = asked(variables)
    except (gpu_site.SiteError, OSError) as error:
        print(f"gpu-check: error: {error}", file=sys.stderr)
        return FAILED
    if "gpu" not in facts and not args.dry_run:
        print("gpu-check: error: PyTorch sees no CUDA device; --dry-run tries without one", file=sys.stderr)
        return FAILED
    about = {"commit": variables["VLLM_EXT_COMMIT"], "python": platform.python_version(), **facts}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        runner = Runner(environment=variables, modules=modules, scratch=Path(scratch), dry=args.dry_run)
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
        found = Check(runner=runner, out=args.out, about=about, total_s=args.total_s)
        found.run([part for part in PARTS if part.name in args.parts.split(",")])
    return found.status()


def _filled(argument: str, texts: Mapping[str, str]) -> str:
    for name, value in texts.items():
        argument = argument.replace(name, value)
    return argument


def _short(result: Found) -> dict[str, Any]:
    return {name: result[name] for name in ("status", "seconds", "left out") if name in result}


def _write(path: Path, found: Mapping[str, Any]) -> None:
    """Write a file in one move: whoever reads it may come at any time."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(found, indent=1))
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
