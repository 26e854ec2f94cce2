"""Fingerprints: what changes them, what does not, and that reading a file gives what the live function gives."""

from __future__ import annotations

import functools
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.hooks import __main__ as command
from vllm_ext.hooks import fingerprint as module
from vllm_ext.hooks.fingerprint import fingerprint, forget_sources
from vllm_ext.hooks.sources import fingerprint_source, read_module

PLAIN = "def f(a, b=1):\n    return a + b\n"

SAME = {
    "docstring": 'def f(a, b=1):\n    """Explain."""\n    return a + b\n',
    "comments and layout": "def f(\n    a,\n    b = 1,\n):\n    # why\n    return (a +\n        b)\n",
    "further down": "import os\n\n\n" + PLAIN,
    "below an if": "if True:\n    def f(a, b=1):\n        return a + b\n",
    "last definition wins": "def f():\n    pass\n\n\n" + PLAIN,
}
OTHER = {
    "default": "def f(a, b=2):\n    return a + b\n",
    "parameter": "def f(a, b=1, c=None):\n    return a + b\n",
    "body": "def f(a, b=1):\n    return a - b\n",
    "statement": "def f(a, b=1):\n    a += 0\n    return a + b\n",
    "decorator": "@d\ndef f(a, b=1):\n    return a + b\n",
    "annotation": "def f(a: int, b=1):\n    return a + b\n",
    "async": "async def f(a, b=1):\n    return a + b\n",
}


@pytest.mark.parametrize("text", SAME.values(), ids=SAME.keys())
def test_what_does_not_change_the_code_keeps_the_fingerprint(text: str) -> None:
    assert fingerprint_source(text, "f") == fingerprint_source(PLAIN, "f")


@pytest.mark.parametrize("text", OTHER.values(), ids=OTHER.keys())
def test_what_changes_the_code_changes_the_fingerprint(text: str) -> None:
    assert fingerprint_source(text, "f") != fingerprint_source(PLAIN, "f")


def test_constants_of_different_types_differ() -> None:
    found = {
        fingerprint_source(f"def f():\n    return {value}\n", "f")
        for value in ("1", "1.0", "True", "'1'", "b'1'", "None")
    }
    assert len(found) == 6


def test_the_fingerprint_does_not_depend_on_the_python_that_computes_it() -> None:
    """Frozen: the verified tables are useless if another Python, or a change of the algorithm, gives another."""
    text = (
        "@deco(1)\nasync def f(a, /, b: int = 1, *c, d=None, **e) -> 'x':\n"
        '    """Doc."""\n'
        "    x = f'{a!r:>{b}} é' 'tail' f'{d=}'\n"
        "    async with a as b, c: pass\n"
        "    return [*c, {**e}, lambda: ..., -1.5e3, b'\\x00', 'é\\U0001F600']\n"
    )
    assert fingerprint_source(text, "f") == "41ee9bae6a8e7845"


def test_methods_are_found_by_qualified_name() -> None:
    text = "class A:\n    class B:\n        def f(a, b=1):\n            return a + b\n"
    assert fingerprint_source(text, "A.B.f") == fingerprint_source(PLAIN, "f")


@pytest.mark.parametrize("qualname", ["g", "A", "A.g", "f.g"])
def test_what_is_not_defined_is_an_error(qualname: str) -> None:
    with pytest.raises(LookupError):
        fingerprint_source("class A:\n    pass\n\n\n" + PLAIN, qualname)


class Sample:
    def plain(self, x: int) -> str:
        """Text whose lines
        start at odd columns.
        """
        return f"""{x}
at column 0"""

    @staticmethod
    def static(x: int) -> int:
        return x

    @classmethod
    @functools.lru_cache
    def cached(cls) -> int:
        return 1


SOURCE = Path(__file__).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["plain", "static"])
def test_a_live_function_has_the_fingerprint_of_its_source(name: str) -> None:
    stored: Any = vars(Sample)[name]
    function = getattr(stored, "__func__", stored)
    assert fingerprint(function) == fingerprint_source(SOURCE, f"Sample.{name}")


def wrapped_by_a(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper_a(*args: Any) -> Any:
        return function(*args)

    return wrapper_a


def test_wrappers_are_named_outermost_first() -> None:
    inner = fingerprint(Sample.plain)
    assert fingerprint(wrapped_by_a(Sample.plain)) == f"{inner}+wrapper_a"
    assert fingerprint(vars(Sample)["cached"].__func__).endswith("+_lru_cache_wrapper")


def test_wrappers_that_do_not_count_are_left_out() -> None:
    wrapper = wrapped_by_a(Sample.plain)
    assert fingerprint(wrapper, ignore=lambda f: f is wrapper) == fingerprint(Sample.plain)


@pytest.mark.parametrize("function", [len, functools.partial(print), lambda: 1], ids=["builtin", "partial", "lambda"])
def test_what_has_no_readable_source_is_an_error(function: Any) -> None:
    with pytest.raises(LookupError):
        fingerprint(function)


def test_a_function_made_at_run_time_is_an_error() -> None:
    scope: dict[str, Any] = {}
    exec(PLAIN, scope)  # noqa: S102 - the point of the test
    with pytest.raises(LookupError):
        fingerprint(scope["f"])


@pytest.mark.parametrize("kind", ["directory", "wheel", "sdist"])
def test_the_command_reads_sources_without_importing_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    file = tmp_path / "tree" / "pkg" / "mod.py"
    file.parent.mkdir(parents=True)
    file.write_text("raise RuntimeError('imported')\n" + PLAIN, encoding="utf-8")
    source = tmp_path / "tree"
    if kind == "wheel":
        source = tmp_path / "pkg.whl"
        with zipfile.ZipFile(source, "w") as wheel:
            wheel.write(file, "pkg/mod.py")
    elif kind == "sdist":
        source = tmp_path / "pkg.tar.gz"
        with tarfile.open(source, "w:gz") as sdist:
            sdist.add(file, "pkg-1.0/pkg/mod.py")
    assert command.main(["--source", str(source), "pkg.mod:f", "pkg.mod:g", "pkg.other:f"]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == f"pkg.mod:f  {fingerprint_source(PLAIN, 'f')}"
    assert "absent" in second
    assert "absent" in third


def test_a_function_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler is verified whenever one is built: parsing vLLM's sources again took half of some tests' time."""
    wanted = fingerprint(read_module)
    forget_sources()
    parsed: list[str] = []
    monkeypatch.setattr(module, "_functions_of", lambda filename: parsed.append(filename) or {})
    assert fingerprint(read_module) == wanted
    assert parsed == []


def test_a_function_that_was_given_other_code_has_another_fingerprint() -> None:
    def function() -> int:
        return 1

    def other() -> int:
        return 2

    before = fingerprint(function)
    function.__code__ = other.__code__
    assert fingerprint(function) == fingerprint(other) != before
