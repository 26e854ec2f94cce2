import hashlib
import multiprocessing
import os
import re
import shutil
import stat
from pathlib import Path

import pytest

from vllm_ext.kernels import native

SOURCE = 'extern "C" int answer() { return ANSWER; }\n'


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_EXT_CACHE", str(tmp_path / "cache"))
    native.compiler_version.cache_clear()


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


def kept(tmp_path) -> list[Path]:
    return sorted((tmp_path / "cache" / "native").glob("*.so"))


def compiler(folder: Path, body: str) -> None:
    """Put a script called as the compiler into ``folder``."""
    folder.mkdir()
    script = folder / native.COMPILER
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)


def answer(source: Path) -> int:
    return int(native.load(source, flags=("-DANSWER=7",)).answer())


def in_another_process(source: Path, processes: int) -> list[int]:
    """Load at once in so many processes: the linker never looks again at a file of the same name in one process."""
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return pool.map(answer, [source] * processes, chunksize=1)


def test_function_of_a_source_is_called(source):
    assert native.load(source, flags=("-DANSWER=42",)).answer() == 42


def test_second_load_compiles_nothing(source, monkeypatch):
    native.load(source, flags=("-DANSWER=1",))

    def no_compile(*_):
        raise AssertionError("compiled again")

    monkeypatch.setattr(native, "_compile", no_compile)
    assert native.load(source, flags=("-DANSWER=1",)).answer() == 1


@pytest.mark.parametrize("change", ["source", "header", "flags", "compiler", "machine"])
def test_what_the_code_depends_on_is_part_of_its_name(source, tmp_path, monkeypatch, change):
    native.load(source, flags=("-DANSWER=1",))
    flags = ("-DANSWER=1",)
    if change == "source":
        source.write_text("// changed\n" + SOURCE)
    elif change == "header":
        source.with_name("beside.h").write_text("// new\n")
    elif change == "flags":
        flags = ("-DANSWER=2",)
    elif change == "compiler":
        monkeypatch.setattr(native, "compiler_version", lambda: "g++ of tomorrow")
    else:
        monkeypatch.setattr(native, "machine", lambda: "another machine")
    native.load(source, flags=flags)
    assert len(kept(tmp_path)) == 2


@pytest.mark.parametrize("content", [b"", b"no machine code", None], ids=["empty", "other", "cut off"])
def test_damaged_file_is_set_aside_and_made_again(source, tmp_path, caplog, content):
    in_another_process(source, 1)
    (path,) = kept(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    assert native.load(source, flags=("-DANSWER=7",)).answer() == 7
    assert path.read_bytes() == whole
    assert path.with_suffix(".bad").exists()
    assert "compiled again" in caplog.text


def test_whole_file_that_does_not_load_is_set_aside(source, tmp_path, caplog):
    in_another_process(source, 1)
    (path,) = kept(tmp_path)
    path.write_bytes(b"#!" + hashlib.sha256(b"#!").digest())
    assert native.load(source, flags=("-DANSWER=7",)).answer() == 7
    assert "does not load" in caplog.text


def test_missing_compiler_is_named_with_the_remedy(source, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(native.CompilerMissing, match=r"g\+\+ was not found on the path; install it"):
        native.load(source)


def test_compiler_that_does_not_run_is_named_with_the_remedy(source, monkeypatch, tmp_path):
    compiler(tmp_path / "bin", "exit 3")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(native.CompilerMissing, match=r"does not run: .*status 3.*; install it"):
        native.load(source)


def test_refused_source_raises_in_the_words_of_the_compiler(source, tmp_path):
    source.write_text("int x = unknown;\n")
    with pytest.raises(native.CompileError, match=r"answer\.cpp: g\+\+.*exited with status 1.*unknown"):
        native.load(source)
    assert kept(tmp_path) == []


def test_error_in_one_line_names_the_first_of_the_compilers(source):
    source.write_text('#include "beside.h"\n')
    source.with_name("beside.h").write_text("int x = unknown;\nint y = unknown;\n")
    with pytest.raises(native.CompileError) as caught:
        native.load(source)
    line = native.brief(caught.value)
    assert re.fullmatch(
        r"answer\.cpp: g\+\+.*exited with status 1; .*beside\.h:1:\d+: error: .unknown. was not .*", line
    )


def test_error_of_one_line_is_taken_whole(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(native.CompilerMissing) as caught:
        native.compiler_version()
    assert native.brief(caught.value) == str(caught.value)


def test_folder_that_cannot_be_made_costs_a_warning(source, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VLLM_EXT_CACHE", str(tmp_path / "file"))
    assert native.load(source, flags=("-DANSWER=5",)).answer() == 5
    assert "not kept for other processes" in caplog.text


def test_processes_that_need_one_file_at_once_compile_it_once(source, tmp_path, monkeypatch):
    real = shutil.which(native.COMPILER)
    compiler(tmp_path / "bin", f'case "$*" in *-shared*) echo x >> {tmp_path}/calls;; esac\nexec {real} "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert in_another_process(source, 3) == [7, 7, 7]
    assert (tmp_path / "calls").read_text() == "x\n"
    assert len(kept(tmp_path)) == 1
