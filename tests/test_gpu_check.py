"""The check of a machine with a GPU: what is kept of commands that fail, what counts as wrong, and the report."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.extent import HANG_S
from tests.support.processes import is_gone, until

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
HANG = f"time.sleep({HANG_S})"
LINES = [{"case": "first", "over": []}, {"case": "second", "over": ["error"]}]


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("gpu_check")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("gpu_parts")


@pytest.fixture
def runner(gpu_check: ModuleType, tmp_path: Path) -> Any:
    (tmp_path / "scratch").mkdir()
    return gpu_check.Runner(environment={}, modules=frozenset(), scratch=tmp_path / "scratch", dry=False)


@pytest.fixture
def run(gpu_check: ModuleType, runner: Any, tmp_path: Path) -> Any:
    """Runs parts of commands; returns the check, with the folder of its files."""

    def checked(*parts: Any, total_s: float = 2.0 * HANG_S) -> Any:
        (tmp_path / "out").mkdir()
        end = time.monotonic() + total_s
        check = gpu_check.Check(runner=runner, out=tmp_path / "out", about={"commit": "abc"}, end=end)
        check.run(parts)
        return check

    return checked


def command(parts: ModuleType, name: str, text: str, **options: Any) -> Any:
    """A command that runs some Python, in which ``out`` is the file that it may write."""
    text = f"import json, os, subprocess, sys, time\nout, folder = sys.argv[1:]\n{text}"
    share = parts.Share(least_s=0.0, most_s=float(HANG_S))
    arguments = ("-c", text, "{out}", "{folder}")
    return parts.Command(name=name, arguments=arguments, share=share, needs=options.pop("needs", ""), **options)


def part(parts: ModuleType, name: str, *commands: Any) -> Any:
    return parts.Part(name=name, commands=commands)


def write(value: object) -> str:
    return f"open(out + '.new', 'w').write(json.dumps({value!r})); os.replace(out + '.new', out)"


def summary_of(folder: Path) -> Any:
    return json.loads((folder / "summary.json").read_text())["parts"]


def test_each_part_makes_a_file_and_the_summary_says_what_became_of_it(
    gpu_check: ModuleType, parts: ModuleType, run: Any
) -> None:
    check = run(
        part(
            parts,
            "one",
            command(parts, "writes", write({"ms": 3})),
            command(parts, "prints", "print('noise'); print(json.dumps({'a': 2}))", at_once=True),
            command(parts, "fails", "print('why', file=sys.stderr); sys.exit(2)"),
        )
    )
    found = json.loads((check.out / "one.json").read_text())
    assert found["commit"] == "abc"
    assert found["runs"]["writes"]["result"] == {"ms": 3}
    assert found["runs"]["prints"]["result"] == [{"a": 2}]
    assert (found["runs"]["fails"]["status"], found["runs"]["fails"]["tail"]) == (2, "why")
    outcomes = {name: one["outcome"] for name, one in summary_of(check.out)["one"].items()}
    assert outcomes == {"writes": "done", "prints": "done", "fails": "failed"}
    assert check.status() == gpu_check.FAILED


def test_what_is_known_is_written_after_every_command(parts: ModuleType, run: Any, tmp_path: Path) -> None:
    """Whoever kills the check itself keeps what it had found: the second command of a part reads the first's result."""
    summary = tmp_path / "out" / "summary.json"
    reads = f"open(out, 'w').write(open({str(summary)!r}).read())"
    check = run(part(parts, "one", command(parts, "first", write(1)), command(parts, "second", reads)))
    assert check.found["one"]["second"]["result"]["parts"]["one"]["first"]["outcome"] == "done"


def test_a_command_beyond_its_limit_is_ended_with_its_children_and_what_it_wrote_is_kept(
    parts: ModuleType, runner: Any
) -> None:
    child = f"subprocess.Popen([sys.executable, '-c', 'import time; {HANG}']).pid"
    text = f"open(out + '.new', 'w').write(json.dumps({child})); os.replace(out + '.new', out); {HANG}"
    running = runner.start("slow", command(parts, "hangs", text), 600.0)
    until((runner.folder("slow") / "hangs.json").exists)
    found = runner.wait([running], 0.0)["hangs"]
    assert (found["outcome"], found["status"]) == ("incomplete", -signal.SIGKILL)
    assert found["why"] == "ended at its limit of 0 s"
    until(lambda: is_gone(found["result"]))


def test_a_command_is_told_to_end_before_its_limit(parts: ModuleType, runner: Any) -> None:
    says = parts.Command(name="says", arguments=("-c", "import sys; print(sys.argv[1])", "{seconds}"))
    runner.wait([runner.start("one", says, 160.0)], HANG_S)
    assert (runner.folder("one") / "says.stdout").read_text() == "150\n"


def test_lines_that_a_command_printed_before_its_limit_are_kept_and_what_they_call_over_is_wrong(
    parts: ModuleType, runner: Any
) -> None:
    """Its last line, which would say so, is missing, and the one before is cut off."""
    printed = f"for one in {LINES!r}: print(json.dumps(one))\nprint('{{\"case', end='', flush=True); {HANG}"
    running = runner.start("slow", command(parts, "prints", printed), 600.0)
    until(lambda: (runner.folder("slow") / "prints.stdout").read_text().endswith("case"))
    found = runner.wait([running], 0.0)["prints"]
    assert (found["outcome"], found["result"], found["wrong"]) == ("incomplete", LINES, ["second"])


def test_a_descendant_that_holds_the_output_open_keeps_nobody_waiting(
    gpu_check: ModuleType, parts: ModuleType, run: Any
) -> None:
    """It has a session of its own, so that it outlives the command."""
    child = f"subprocess.Popen([sys.executable, '-c', 'import time; {HANG}'], start_new_session=True).pid"
    check = run(part(parts, "one", command(parts, "leaves", f"print(json.dumps({{'pid': {child}}}))")))
    (said,) = check.found["one"]["leaves"]["result"]
    os.kill(said["pid"], signal.SIGKILL)
    assert check.status() == gpu_check.DONE


def test_what_a_command_leaves_running_is_ended_before_the_next_begins(parts: ModuleType, run: Any) -> None:
    """It would hold the device's memory."""
    child = f"subprocess.Popen([sys.executable, '-c', 'import time; {HANG}']).pid"
    check = run(part(parts, "one", command(parts, "leaves", f"print(json.dumps({{'pid': {child}}}))")))
    until(lambda: is_gone(check.found["one"]["leaves"]["result"][0]["pid"]))


def test_bytes_that_are_no_text_are_kept_as_well_as_they_go(parts: ModuleType, run: Any) -> None:
    check = run(part(parts, "one", command(parts, "bytes", r"sys.stdout.buffer.write(b'\xff bad'); sys.exit(3)")))
    assert check.found["one"]["bytes"]["tail"] == "\N{REPLACEMENT CHARACTER} bad"


WRONG_LINE = "print(json.dumps({'wrong': ['a case']}))"


@pytest.mark.parametrize(
    ("text", "outcome", "status"),
    [
        (write({"wrong": []}), "done", 0),
        (f"{write({'wrong': ['tier-8']})}; sys.exit(1)", "wrong", 1),
        (f"print(json.dumps({{'case': 1}})); {WRONG_LINE}; sys.exit(1)", "wrong", 1),
        (WRONG_LINE, "wrong", 1),
        (f"{WRONG_LINE}; sys.exit(3)", "failed", 1),
        ("import nonexistent_module", "failed", 3),
        ("sys.exit(1)", "failed", 3),
        (f"{write({'wrong': []})}; 1 / 0", "failed", 3),
        (f"{write([1])}; sys.exit(3)", "failed", 3),
        ("os.kill(os.getpid(), 9)", "failed", 3),
    ],
    ids=[
        "right", "wrong in the file", "wrong in the last line", "wrong and 0", "wrong and an engine that failed",
        "no such module", "1 without a result", "1 with nothing wrong", "an engine that failed", "killed",
    ],
)  # fmt: skip
def test_only_a_result_that_says_so_is_wrong(parts: ModuleType, run: Any, text: str, outcome: str, status: int) -> None:
    """Python exits with 1 after any exception."""
    check = run(part(parts, "one", command(parts, "compares", text)))
    assert (check.found["one"]["compares"]["outcome"], check.status()) == (outcome, status)


def test_what_is_wrong_stays_wrong_beside_what_failed(gpu_check: ModuleType, parts: ModuleType, run: Any) -> None:
    fails, wrong = command(parts, "fails", "sys.exit(3)"), command(parts, "wrong", f"{WRONG_LINE}; sys.exit(1)")
    check = run(part(parts, "one", wrong, fails))
    assert check.status() == gpu_check.WRONG
    assert summary_of(check.out)["one"]["wrong"]["wrong"] == ["a case"]


def test_parts_for_which_no_time_is_left_are_named(gpu_check: ModuleType, parts: ModuleType, run: Any) -> None:
    check = run(part(parts, "late", command(parts, "never", write(1))), total_s=1.0)
    assert check.found["late"] == {"never": {"outcome": "not begun", "why": "no time is left"}}
    assert check.status() == gpu_check.FAILED


def test_what_goes_on_in_the_background_sees_its_parts_files_and_is_waited_for(
    gpu_check: ModuleType, parts: ModuleType, run: Any
) -> None:
    reads = "time.sleep(0.2); open(out, 'w').write(open(folder + '/first.json').read())"
    both = part(parts, "both", command(parts, "first", write(7)), command(parts, "behind", reads, background=True))
    check = run(both, part(parts, "other", command(parts, "runs", write(1))))
    assert list(check.found) == ["both", "other"]
    assert json.loads((check.out / "both.json").read_text())["runs"]["behind"]["result"] == 7
    assert check.status() == gpu_check.DONE


def test_what_needs_a_module_that_is_not_there_is_left_out(gpu_check: ModuleType, parts: ModuleType, run: Any) -> None:
    check = run(part(parts, "one", command(parts, "engine", "1/0", needs="vllm")))
    assert "bring the bundle" in check.found["one"]["engine"]["why"]
    assert check.status() == gpu_check.FAILED


def test_results_that_can_no_longer_be_written_end_nothing(
    gpu_check: ModuleType, parts: ModuleType, run: Any, tmp_path: Path
) -> None:
    """The folder becomes a file while the first command runs."""
    out = str(tmp_path / "out")
    harms = command(parts, "harms", f"os.rmdir({out!r}); open({out!r}, 'w')")
    check = run(part(parts, "one", harms, command(parts, "goes on", write(1))))
    assert check.found["one"]["goes on"]["outcome"] == "done"
    assert check.status() == gpu_check.FAILED


def test_least_shares_and_the_set_up_fit_into_eight_minutes(parts: ModuleType) -> None:
    stages = [stage for one in parts.PARTS for stage in one.stages if not stage.is_background]
    assert parts.SET_UP_S + sum(stage.share.least_s for stage in stages) <= parts.TOTAL_S <= 475.0
    assert all(15.0 <= stage.share.least_s <= stage.share.most_s for stage in stages)


@pytest.mark.parametrize(("set_up_s", "starved"), [(0.0, 0), (35.0, 0), (100.0, 2)])
def test_every_command_gets_its_least_though_all_before_it_use_all_that_they_may(
    gpu_check: ModuleType, parts: ModuleType, monkeypatch: pytest.MonkeyPatch, set_up_s: float, starved: int
) -> None:
    """A set-up that takes too long is at the cost of the last two."""
    clock, limits = [set_up_s], []

    def wait(started: list[str], limit_s: float) -> dict[str, Any]:
        limits.append(limit_s)
        clock[0] += limit_s
        return {name: {"outcome": "done"} for name in started}

    monkeypatch.setattr(gpu_check, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    runner = SimpleNamespace(
        dry=False, running=[], obstacle=lambda command: None, start=lambda part, command, limit_s: command.name,
        wait=wait, signals=SimpleNamespace(check=lambda: None), end_all=lambda why: [],
    )  # fmt: skip
    check = gpu_check.Check(runner=runner, out=None, about={}, end=parts.TOTAL_S)
    check.run(parts.PARTS)
    stages = [stage for one in parts.PARTS for stage in one.stages if not stage.is_background]
    fed = stages[: len(stages) - starved]
    assert [stage for stage, limit in zip(fed, limits, strict=False) if limit < stage.share.least_s] == []
    assert all(limit <= stage.share.most_s for stage, limit in zip(stages, limits, strict=False))
    assert len(limits) >= len(fed)
    assert clock[0] <= parts.TOTAL_S


def test_the_time_counts_from_before_the_set_up(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock, limits = [1000.0], []

    def environment(*_: object) -> dict[str, str]:
        clock[0] += 100.0
        return {"VLLM_EXT_COMMIT": "abc"}

    def asked(_: object, limit_s: float) -> Any:
        limits.append(limit_s)
        clock[0] += 20.0
        return {"gpu": "fake"}, frozenset()

    monkeypatch.setattr(gpu_check, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(gpu_check, "environment", environment)
    monkeypatch.setattr(gpu_check, "asked", asked)
    monkeypatch.setattr(gpu_check.Check, "run", lambda check, _: limits.append(check.left_s))
    gpu_check.main(["--out", str(tmp_path / "out"), "--total-s", "300"])
    assert limits == [200.0, 180.0]


def test_the_page_says_how_long_parts_may_take(parts: ModuleType) -> None:
    rows = [line.split("|") for line in (ROOT / "docs" / "gpu.md").read_text().splitlines() if line.startswith("| `")]
    said = {cells[1].strip(" `"): (cells[3].strip(), cells[4].strip()) for cells in rows}
    shares = {one.name: [stage.share for stage in one.stages] for one in parts.PARTS}
    assert said == {
        name: (f"{sum(one.least_s for one in those):g} s", f"{sum(one.most_s for one in those):g} s")
        for name, those in shares.items()
    }


def test_all_results_are_at_most_eight_files(parts: ModuleType) -> None:
    """As many as come back from some machines: one for each part, the profile and the summary."""
    assert len(parts.PARTS) + 2 <= 8


def test_scripts_of_all_commands_exist(parts: ModuleType) -> None:
    for one in (one for each in parts.PARTS for one in each.commands):
        named = [argument for argument in one.arguments if argument.endswith(".py")]
        assert named
        assert all((ROOT / path).is_file() for path in named), one


def test_engines_with_what_is_ours_are_compared_before_others(
    parts: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    (engines,) = [one for one in parts.PARTS[0].commands if one.name == "engines"]
    settings = engines.arguments[engines.arguments.index("--settings") + 1].split(",")
    assert sorted(settings) == sorted(importlib.import_module("gpu_right").SETTINGS)
    assert settings == ["stock", "own", "tier-8", "int8", "triton", "tier-16"]


def test_a_commit_that_is_given_goes_before_the_repositorys(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_EXT_COMMIT", "1234abcd")
    assert gpu_check.commit() == "1234abcd"


@pytest.mark.parametrize("harm", ["import os; os.kill(os.getpid(), 9)", "import sys; sys.exit(0)"])
def test_a_pytorch_that_ends_python_without_a_word_is_one_line(
    gpu_check: ModuleType, tmp_path: Path, harm: str
) -> None:
    (tmp_path / "torch.py").write_text(harm)
    with pytest.raises(gpu_check.SetUpError, match=r"PyTorch or Triton does not import: status (-9|0)"):
        gpu_check.asked({"PYTHONPATH": str(tmp_path)}, HANG_S)


def checked(*arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name not in ("OUT", "BUNDLE")}
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False, env=variables)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parts", "nonsense", "--dry-run"], "--parts=nonsense: nonsense unknown, must be of right, token_budget"),
        ([], "--out=: must be the folder of the results"),
        (["--out", __file__], f"--out={__file__}: is a file, or below one; must be a folder"),
        (["--out", f"{__file__}/below"], f"--out={__file__}/below: is a file, or below one; must be a folder"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(arguments: list[str], said: str) -> None:
    done = checked(*arguments)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("out", ["/proc", "/proc/there"])
def test_a_folder_that_cannot_be_written_is_one_line_before_anything_runs(out: str) -> None:
    done = checked("--dry-run", "--out", out)
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"gpu-check: error: --out={out}: can't be written (")


def test_the_folder_of_make_may_have_a_space(tmp_path: Path) -> None:
    done = subprocess.run(
        ["make", "-n", "gpu-check", f"OUT={tmp_path}/a b"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    words = shlex.split(done.stdout)
    assert words[words.index("--out") + 1] == f"{tmp_path}/a b"


def test_a_try_imports_everything_and_understands_all_arguments(tmp_path: Path) -> None:
    done = checked("--dry-run", "--out", str(tmp_path), "--total-s", str(HANG_S))
    assert done.returncode == 0, done.stderr
    found = summary_of(tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == len(found) + 1
    assert all(one["status"] == 0 for runs in found.values() for one in runs.values())
