"""Run vLLM's own tests with our scheduler in place of vLLM's, once for each system: `make conformance`.

    python scripts/conformance.py [--systems "fcfs alise"] [--jobs 2]

The tests are those of the installed version, from its source archive (`upstream_archive`), unpacked under
``.cache/upstream``. First vLLM's own schedulers run them, as a control: what fails there is not asked of a system. Then
each system that a server may run does: the tests that make a scheduler, and once those that make none, with our hooks
installed. `tests/conformance/upstream_differs.toml` names what must differ and why.

The table goes to stderr, and the outcomes of each row with their tracebacks as JSON to ``.cache/upstream/outcomes``.
The exit status is 1 if a test fails that is not on the list, or passes although it is.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import upstream_archive
import upstream_plugin
from upstream_differs import CONTROLS, Entry, Verdict, judge, read, unmatched

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "upstream"
OUTCOMES = CACHE / "outcomes"
LIST = ROOT / "tests" / "conformance" / "upstream_differs.toml"

SUITES: Mapping[str, str] = {
    "scheduler": "tests/v1/core/test_scheduler.py",
    "async": "tests/v1/core/test_async_scheduler.py",
    "deferred": "tests/v1/core/test_deferred_block_free.py",
    "slots": "tests/v1/core/test_worker_slot_overflow.py",
    "prefix": "tests/v1/core/test_prefix_caching.py",
    "kv_utils": "tests/v1/core/test_kv_cache_utils.py",
    "offloading": "tests/v1/kv_connector/unit/offloading_connector",
}
"""By column of the table. The offloading connector's tests hand it a mock of vLLM's spec, which ours replaces: they run
with vLLM's connector below our scheduler. `tests/kv` has the tests of our own."""

MODELS: Mapping[str, tuple[str, str]] = {
    "facebook/opt-125m": ("OPTConfig", "OPTForCausalLM"),
    "llava-hf/llava-1.5-7b-hf": ("LlavaConfig", "LlavaForConditionalGeneration"),
    "Qwen/Qwen3-0.6B": ("Qwen3Config", "Qwen3ForCausalLM"),
    "Qwen/Qwen1.5-7B": ("Qwen2Config", "Qwen2ForCausalLM"),
}
"""Models whose configuration the tests read: class of transformers, whose defaults will do, and architecture."""

_HANG_S = 3600
_NAMED = 200
"""Most unexpected results named below the table."""


class RunError(RuntimeError):
    """A run of vLLM's tests ended without outcomes."""


@dataclass(frozen=True)
class Tests:
    """vLLM's tests, and what they need to run without a network."""

    folder: Path
    redirect: Path
    """File that tells vLLM where the models are."""

    def run(self, system: str, only: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """Return what became of each test; see `upstream_plugin.Tested`.

        Args:
            system: As the plugin takes it.
            only: Ids of the tests to run; all if it is left out.

        Raises:
            RunError: There are no outcomes; holds the end of what was printed.
        """
        with tempfile.TemporaryDirectory() as scratch:
            result = Path(scratch, "result.json")
            variables = {upstream_plugin.SYSTEM: system, upstream_plugin.RESULT: str(result)}
            if only is not None:
                chosen = Path(scratch, "only.txt")
                chosen.write_text("\n".join(only), encoding="utf-8")
                variables[upstream_plugin.ONLY] = str(chosen)
            done = subprocess.run(
                self._command(scratch),
                cwd=self.folder,
                env=self._environment() | variables,
                capture_output=True,
                text=True,
                check=False,
                timeout=_HANG_S,
            )
            if not result.exists() or done.returncode not in (0, 1):
                raise RunError(f"{system or 'control'}: pytest ended with {done.returncode}:\n{done.stdout[-4000:]}")
            found: dict[str, dict[str, Any]] = json.loads(result.read_text(encoding="utf-8"))
            return found

    def _command(self, scratch: str) -> list[str]:
        """Without vLLM's top-level conftest, which imports what runs models."""
        options = ["-q", "--tb=short", "-c", "pyproject.toml", "--confcutdir=tests/v1", f"--basetemp={scratch}/tmp"]
        options += ["-o", "asyncio_default_fixture_loop_scope=function"]
        plugins = ["-p", "upstream_plugin", "-p", "no:cacheprovider", "-p", "no:randomly"]
        return [sys.executable, "-m", "pytest", *plugins, *options, *SUITES.values()]

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent),
            "VLLM_MODEL_REDIRECT_PATH": str(self.redirect),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
        }


def write_models(folder: Path) -> Path:
    """Write the models' configurations, and return the file that tells vLLM where they are."""
    import transformers

    lines = []
    for name, (config, architecture) in MODELS.items():
        model = folder / name.replace("/", "--")
        model.mkdir(parents=True, exist_ok=True)
        getattr(transformers, config)(architectures=[architecture]).save_pretrained(model)
        lines.append(f"{name}\t{model}\n")
    redirect = folder / "redirect.txt"
    redirect.write_text("".join(lines), encoding="utf-8")
    return redirect


@dataclass(frozen=True)
class Row:
    """What became of all tests under a system or control."""

    name: str
    outcomes: Mapping[str, dict[str, Any]]

    def by_suite(self, entries: Sequence[Entry]) -> dict[str, Verdict]:
        """Return the verdict on each suite."""
        return {
            column: judge(
                {test: found for test, found in self.outcomes.items() if test.startswith(path)},
                self.name,
                entries,
            )
            for column, path in SUITES.items()
        }


def systems(chosen: str) -> list[str]:
    """Return the names of the systems to run: those chosen, or all of the table that a server may run.

    Raises:
        SystemExit: One is not known, or reads true lengths.
    """
    from vllm_ext.systems import table

    served = [system.name for system in table(unserved=True) if not system.oracle]
    wanted = chosen.split() or served
    if unknown := sorted(set(wanted) - set(served)):
        raise SystemExit(f"SYSTEMS: {', '.join(unknown)}: must be among {', '.join(served)}")
    return wanted


def run_all(tests: Tests, names: Sequence[str], jobs: int) -> list[Row]:
    """Return the rows of the table: the controls, then the systems."""
    say("vLLM's own schedulers")
    plain = kept(Row("vllm", tests.run("")))
    with_scheduler = [test for test, found in plain.outcomes.items() if found["schedulers"]]
    eventual = kept(Row("vllm-async", tests.run(CONTROLS["vllm-async"], with_scheduler)))
    broken = {t for row in (plain, eventual) for t, found in row.outcomes.items() if found["outcome"] == "failed"}
    asked = [test for test in plain.outcomes if test not in broken]
    steered = [test for test in with_scheduler if test not in broken]

    def one(name: str) -> Row:
        row = kept(Row(name, tests.run(name, asked if name == names[0] else steered)))
        say(f"{name}: {len(row.outcomes)} tests")
        return row

    with ThreadPoolExecutor(jobs) as pool:
        return [plain, eventual, *pool.map(one, names)]


def kept(row: Row) -> Row:
    """Return a row, having written it down: a run that ends early has its first rows."""
    OUTCOMES.mkdir(parents=True, exist_ok=True)
    (OUTCOMES / f"{row.name}.json").write_text(json.dumps(row.outcomes, indent=1), encoding="utf-8")
    return row


def say(line: str) -> None:
    """Tell the user how far it is."""
    print(f"== {line}", file=sys.stderr, flush=True)


def report(rows: Sequence[Row], entries: Sequence[Entry]) -> list[str]:
    """Print the table, and return what is unexpected, one line each."""
    width = max(len(row.name) for row in rows)
    print(
        "Passed, and behind + those that differ as listed; ! marks what is unexpected.\n",
        f"{'':{width}}  " + "  ".join(f"{column:>12}" for column in SUITES),
        sep="\n",
        file=sys.stderr,
    )
    wrong: list[str] = []
    everything = set().union(*(row.outcomes for row in rows))
    for row in rows:
        verdicts = row.by_suite(entries)
        print(f"{row.name:{width}}  " + "  ".join(f"{cell(v):>12}" for v in verdicts.values()), file=sys.stderr)
        for verdict in verdicts.values():
            wrong += [f"{row.name}: failed: {t}: {row.outcomes[t]['message']}" for t in verdict.failed]
            wrong += [f"{row.name}: passed, take it from the list: {t}" for t in verdict.stale]
        wrong += [f"{row.name}: there is no such test: {name}" for name in unmatched(everything, row.name, entries)]
    return wrong


def cell(verdict: Verdict) -> str:
    """Return a suite's cell of the table."""
    text = str(verdict.passed)
    if verdict.differs:
        text += f"+{verdict.differs}"
    if verdict.unexpected:
        text += f" !{verdict.unexpected}"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return 1 if there is an unexpected result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="", metavar="NAMES", help="separated by spaces; all if left out")
    parser.add_argument("--jobs", type=int, default=max(1, min(4, (os.cpu_count() or 1) // 2)), metavar="N")
    options = parser.parse_args(arguments)
    names, entries = systems(options.systems), read(LIST)
    try:
        folder = upstream_archive.obtain(importlib.metadata.version("vllm"), CACHE)
        rows = run_all(Tests(folder, write_models(CACHE / "models")), names, options.jobs)
    except (upstream_archive.ArchiveError, RunError) as error:
        print(error, file=sys.stderr)
        return 1
    wrong = report(rows, entries)
    print(*wrong[:_NAMED], sep="\n", file=sys.stderr)
    say(f"{len(wrong)} unexpected" if wrong else "all as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
