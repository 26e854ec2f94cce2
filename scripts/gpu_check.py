#!/usr/bin/env python3
"""Check this checkout on a machine with a GPU, and measure there what only a GPU can tell, in eight minutes.

    python3 scripts/gpu_check.py --out results                        # where vLLM and vllm-ext are installed
    python3 scripts/gpu_check.py --out results --bundle .gpu/vllm.tar.xz      # where neither is: see gpu_bundle.py
    python3 scripts/gpu_check.py --dry-run                            # without a GPU: imports, arguments, report

`gpu_parts` says what is run, in order of value, and how the time is divided. The folder gets a JSON file for each part,
the runtime profile and a summary, seven files, brought up to date after every command. SIGINT and SIGTERM end all that
runs, and what it had written is kept. ``VLLM_EXT_COMMIT`` names the commit where there is no git repository. Needs the
standard library, PyTorch and Triton.

Exit status 0: all is well; 1: a comparison found something wrong; 2: a wrong command line; 3: nothing is known to be
wrong, but something failed, was not done in its time, or was left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_site
from gpu_parts import PARTS, PROFILE, TOTAL_S, Part, Stage
from gpu_runner import MODULES, ROOT, Found, Interrupted, Outcome, Runner, Signals

DEFAULT_BUNDLE = ROOT / ".gpu" / "vllm.tar.xz"
DONE, WRONG, FAILED = 0, 1, 3
"""Exit statuses."""
_LEAST_S = 15.0
"""Nothing is begun with less."""


class SetUpError(Exception):
    """Why nothing can be run here, in one line."""


@dataclass(kw_only=True)
class Check:
    """Runs parts within a time, and writes what they found.

    Args:
        runner: Of their commands.
        out: Receives the files; None: nothing is written.
        about: What every file says of commit and machine.
        end: When all has to be over, by the monotonic clock.
    """

    runner: Runner
    out: Path | None
    about: Mapping[str, Any]
    end: float
    found: dict[str, dict[str, Found]] = field(default_factory=dict)
    """By part and command."""
    unwritten: bool = False
    """A file could not be written."""

    @property
    def left_s(self) -> float:
        """Seconds that are left of the time."""
        return self.end - time.monotonic()

    def run(self, parts: Sequence[Part]) -> None:
        """Run parts in their order; what goes on in the background is waited for at the end.

        At a signal, all that runs is ended and noted, and what was not begun is named.
        """
        stages = [stage for part in parts for stage in part.stages]
        try:
            for number, stage in enumerate(stages, 1):
                self._run(stage, self._limit_s(stage, stages[number:]))
            for one in list(self.runner.running):
                self._note(one.part, self.runner.wait([one], self.left_s))
        except Interrupted as signal:
            why = f"interrupted by {signal}"
            print(f"gpu-check: {why}", file=sys.stderr, flush=True)
            for part, name, result in self.runner.end_all(why):
                self._note(part, {name: result})
            for stage in stages:
                self._skip(stage, why)
        finally:
            self.runner.end_all("the check ended")

    def _limit_s(self, stage: Stage, later: Sequence[Stage]) -> float:
        """Return the seconds that a stage gets; a try has no limit but the whole time."""
        if self.runner.dry:
            return self.left_s
        return stage.share.limit_s(self.left_s, [other.share for other in later])

    def _run(self, stage: Stage, limit_s: float) -> None:
        """Run a stage to its end, or to its limit; of one in the background, only start it."""
        obstacles = {command.name: self.runner.obstacle(command) for command in stage.commands}
        left_out = {name: reason for name, reason in obstacles.items() if reason}
        self._note(stage.part, {name: {"outcome": Outcome.LEFT_OUT, "why": why} for name, why in left_out.items()})
        self.runner.signals.check()
        if (self.left_s if stage.is_background else limit_s) < _LEAST_S:
            self._skip(stage, "no time is left")
            return
        commands = [command for command in stage.commands if command.name not in left_out]
        started = [self.runner.start(stage.part, command, limit_s) for command in commands]
        if not stage.is_background:
            self._note(stage.part, self.runner.wait(started, limit_s))

    def _skip(self, stage: Stage, why: str) -> None:
        """Note those commands of a stage of which nothing is known yet."""
        known = self.found.get(stage.part, {})
        names = [command.name for command in stage.commands if command.name not in known]
        self._note(stage.part, {name: {"outcome": Outcome.NOT_BEGUN, "why": why} for name in names})

    def _note(self, part: str, results: Mapping[str, Found]) -> None:
        """Add results to those of a part, and write its file and the summary."""
        if not results:
            return
        self.found.setdefault(part, {}).update(results)
        for name, result in results.items():
            words = ", ".join(f"{key} {value}" for key, value in _short(result).items())
            print(f"{part:14} {name:14} {words}", file=sys.stderr, flush=True)
        if self.out is not None:
            try:
                self._write(part, self.out)
            except OSError as error:
                self.unwritten = True
                print(f"gpu-check: error: --out={self.out}: {error.strerror}", file=sys.stderr, flush=True)

    def _write(self, part: str, out: Path) -> None:
        _replace(out / f"{part}.json", json.dumps({"part": part, **self.about, "runs": self.found[part]}, indent=1))
        if (profile := self.runner.folder(part) / PROFILE).exists():
            _replace(out / PROFILE, profile.read_text())
        short = {
            name: {command: _short(result) for command, result in runs.items()} for name, runs in self.found.items()
        }
        summary = {**self.about, "seconds_left": round(self.left_s), "parts": short}
        _replace(out / "summary.json", json.dumps(summary, indent=1))

    def status(self) -> int:
        """Return the exit status; of a try, what needs vLLM may be left out."""
        results = [result for runs in self.found.values() for result in runs.values()]
        if any(result.get("wrong") for result in results):
            return WRONG
        good = {Outcome.DONE, *([Outcome.LEFT_OUT] if self.runner.dry else [])}
        return FAILED if self.unwritten or {result["outcome"] for result in results} - good else DONE


def asked(environment: Mapping[str, str], limit_s: float) -> tuple[dict[str, Any], frozenset[str]]:
    """Ask a process with these variables what is there.

    Returns:
        Versions of PyTorch and Triton and the name of the ``gpu``, if there is one; and the modules of `MODULES`.

    Raises:
        SetUpError: PyTorch or Triton does not import, or not in time.
    """
    text = f"""
import importlib.util, json, torch, triton
facts = {{"torch": torch.__version__, "triton": triton.__version__}}
if torch.cuda.is_available():
    facts["gpu"] = torch.cuda.get_device_name()
print(json.dumps([facts, [name for name in {[*MODULES]} if importlib.util.find_spec(name)]]))
"""
    variables, command = {**os.environ, **environment}, [sys.executable, "-c", text]
    try:
        done = subprocess.run(command, env=variables, capture_output=True, timeout=max(1.0, limit_s), check=False)
    except subprocess.TimeoutExpired as error:
        raise SetUpError(f"PyTorch and Triton did not import within {limit_s:.0f} s") from error
    said, words = (stream.decode(errors="replace").strip().splitlines() for stream in (done.stdout, done.stderr))
    if done.returncode or not said:
        raise SetUpError(f"PyTorch or Triton does not import: {words[-1] if words else f'status {done.returncode}'}")
    facts, modules = json.loads(said[-1])
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
        found |= gpu_site.search_path(gpu_site.install(ROOT, folder), ROOT / "benchmarks" / "gpu")
    if "PYTHONPATH" in found:
        found["PYTHONPATH"] += f"{os.pathsep}{ROOT}"  # for tests
    return {**found, "VLLM_EXT_COMMIT": commit()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and return the exit status."""
    began = time.monotonic()
    args = _parsed(argv)
    try:
        with Signals() as signals:
            return _checked(args, began + args.total_s, signals)
    except (SetUpError, gpu_site.SiteError, OSError) as error:
        print(f"gpu-check: error: {error}", file=sys.stderr)
    except Interrupted as signal:
        print(f"gpu-check: interrupted by {signal} before anything was run", file=sys.stderr)
    return FAILED


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    out, bundle = os.environ.get("OUT"), os.environ.get("BUNDLE")
    parser.add_argument("--out", type=Path, default=out and Path(out), help="folder of the results (default: $OUT)")
    parser.add_argument("--bundle", type=Path, default=bundle and Path(bundle), help="of gpu_bundle.py (default: "
                        "$BUNDLE, or .gpu/vllm.tar.xz where vLLM is not installed)")  # fmt: skip
    parser.add_argument("--parts", default=",".join(names), help="of them, in order (default: %(default)s)")
    parser.add_argument("--total-s", type=float, default=TOTAL_S, help="for all of it (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="try imports, arguments and the report without a GPU")
    args = parser.parse_args(argv)
    if unknown := set(args.parts.split(",")) - set(names):
        parser.error(f"--parts={args.parts}: {', '.join(sorted(unknown))} unknown, must be of {', '.join(names)}")
    if args.out is None and not args.dry_run:
        parser.error("--out=: must be the folder of the results, or set $OUT")
    if args.out is not None and any(map(os.path.isfile, (args.out, *args.out.parents))):
        parser.error(f"--out={args.out}: is a file, or below one; must be a folder")
    if args.bundle is None and importlib.util.find_spec("vllm") is None and DEFAULT_BUNDLE.exists():
        args.bundle = DEFAULT_BUNDLE
    return args


def _checked(args: argparse.Namespace, end: float, signals: Signals) -> int:
    """Set up, run, and return the exit status.

    Raises:
        Interrupted: A signal came during the set-up, of which nothing is left behind.
        SetUpError: PyTorch, Triton or a GPU is not there, or nothing can be written.
        SiteError: The bundle is not there, or damaged.
        OSError: There is no room for what is unpacked.
    """
    if args.out is not None:
        _try_to_write(args.out)
    folder = Path(tempfile.gettempdir(), "vllm-ext-site")  # stays: a second run unpacks nothing
    variables = environment(args.bundle, folder)
    facts, modules = asked(variables, end - time.monotonic())
    if "gpu" not in facts and not args.dry_run:
        raise SetUpError("PyTorch sees no CUDA device; --dry-run tries without one")
    about = {"commit": variables["VLLM_EXT_COMMIT"], "python": platform.python_version(), **facts}
    signals.at_safe_points = True
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as scratch:
        runner = Runner(
            environment=variables, modules=modules, scratch=Path(scratch), dry=args.dry_run, signals=signals
        )
        check = Check(runner=runner, out=args.out, about=about, end=end)
        check.run([part for part in PARTS if part.name in args.parts.split(",")])
    return check.status()


def _try_to_write(out: Path) -> None:
    """Make the folder of the results, and find out before anything runs whether they can be written.

    Raises:
        SetUpError: They can't.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise SetUpError(f"--out={out}: can't be written ({error.strerror})") from error


def _short(result: Found) -> dict[str, Any]:
    return {name: result[name] for name in ("outcome", "status", "seconds", "wrong", "why") if name in result}


def _replace(path: Path, text: str) -> None:
    """Write a file in one move: whoever reads it may come at any time."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
