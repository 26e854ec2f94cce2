"""The machinery of hooks, on modules written for the purpose: real functions in real files."""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_ext.hooks.errors import UpstreamChanged, UpstreamMissing
from vllm_ext.hooks.fingerprint import fingerprint
from vllm_ext.hooks.patch import Addition, Patch, Reliance, resolve

SOURCE = """
CONSTANT = 3

def greet(name):
    return "hello " + name

async def later(name):
    return "later " + name

class Base:
    def inherited(self):
        return 1

class Thing(Base):
    def method(self, x):
        return x + 1

    @staticmethod
    def static(x):
        return x + 2

    @classmethod
    def of(cls, x):
        return (cls.__name__, x)

class Sub(Thing):
    pass
"""

counter = itertools.count()


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    name = f"upstream_{next(counter)}"
    (tmp_path / f"{name}.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def texts() -> dict[str, str]:
    return {"feature": "f", "why": "w", "breaks_without": "b", "remove_when": "r"}


def shout(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return ("patched", original(*args, **kwargs))


async def shout_later(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return ("patched", await original(*args, **kwargs))


def make_patch(
    module: ModuleType, qualname: str, *, replacement: Callable[..., Any] = shout, rebind: tuple[str, ...] = ()
) -> Patch:
    target = f"{module.__name__}:{qualname}"
    verified = {"1.0": fingerprint(resolve(target).function)}
    return Patch(target=target, verified=verified, replacement=replacement, also_rebind=rebind, **texts())


CALLS: list[tuple[str, Callable[[ModuleType], Any], Any]] = [
    ("greet", lambda m: m.greet("x"), "hello x"),
    ("Thing.method", lambda m: m.Thing().method(1), 2),
    ("Thing.static", lambda m: m.Thing.static(1), 3),
    ("Thing.of", lambda m: m.Thing.of(1), ("Thing", 1)),
    ("Thing.of", lambda m: m.Sub.of(1), ("Sub", 1)),
]
cases = pytest.mark.parametrize(
    ("qualname", "call", "plain"), CALLS, ids=["function", "method", "static", "class", "sub"]
)


@cases
def test_a_patch_takes_effect_and_undo_restores(
    upstream: ModuleType, qualname: str, call: Callable[[ModuleType], Any], plain: Any
) -> None:
    before = resolve(f"{upstream.__name__}:{qualname}").stored
    undo = make_patch(upstream, qualname).apply()
    assert call(upstream) == ("patched", plain)
    undo()
    assert call(upstream) == plain
    assert resolve(f"{upstream.__name__}:{qualname}").stored is before


@cases
def test_a_second_apply_is_a_no_op(
    upstream: ModuleType, qualname: str, call: Callable[[ModuleType], Any], plain: Any
) -> None:
    patch = make_patch(upstream, qualname)
    undo = patch.apply()
    patch.apply()()  # its undo undoes nothing
    assert call(upstream) == ("patched", plain)
    undo()
    assert call(upstream) == plain


async def test_a_coroutine_function_stays_one(upstream: ModuleType) -> None:
    import inspect

    undo = make_patch(upstream, "later", replacement=shout_later).apply()
    assert inspect.iscoroutinefunction(upstream.later)
    assert await upstream.later("x") == ("patched", "later x")
    undo()
    assert await upstream.later("x") == "later x"


def test_a_wrapper_looks_like_the_original(upstream: ModuleType) -> None:
    import inspect

    make_patch(upstream, "greet").apply()
    assert upstream.greet.__name__ == "greet"
    assert list(inspect.signature(upstream.greet).parameters) == ["name"]


@pytest.mark.parametrize(
    "qualname", ["nothing", "Thing.nothing", "Nothing.method", "Thing.inherited", "CONSTANT", "Thing"]
)
@pytest.mark.parametrize("kind", [Patch, Reliance])
def test_a_missing_symbol_is_an_error_with_a_remedy(upstream: ModuleType, qualname: str, kind: type) -> None:
    extra = {"replacement": shout} if kind is Patch else {}
    hook = kind(target=f"{upstream.__name__}:{qualname}", verified={"1.0": "0" * 16}, **extra, **texts())
    with pytest.raises(UpstreamMissing, match=r"install a verified version of vLLM \(1\.0\), or leave out"):
        hook.apply() if kind is Patch else hook.verify()


def test_a_missing_module_is_an_error() -> None:
    hook = Reliance(target="no_such_module_of_ours:f", verified={"1.0": "0" * 16}, **texts())
    with pytest.raises(UpstreamMissing, match="no_such_module_of_ours"):
        hook.verify()


@pytest.mark.parametrize("target", ["module", "module:", ""])
def test_a_target_that_names_nothing_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match=r"must be package\.module:Class\.method"):
        resolve(target)


def test_a_changed_body_is_an_error_and_changes_nothing(upstream: ModuleType) -> None:
    before = upstream.greet
    patch = Patch(target=f"{upstream.__name__}:greet", verified={"1.0": "0" * 16}, replacement=shout, **texts())
    with pytest.raises(UpstreamChanged, match=r"greet is not the verified one .*1\.0"):
        patch.apply()
    assert upstream.greet is before


def test_one_of_several_verified_versions_is_enough(upstream: ModuleType) -> None:
    found = fingerprint(upstream.greet)
    hook = Reliance(target=f"{upstream.__name__}:greet", verified={"1": "0" * 16, "2": found}, **texts())
    assert hook.verify() == "as verified"


def foreign(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def strange_wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return strange_wrapper


def test_a_strangers_wrapper_beneath_ours_is_detected(upstream: ModuleType) -> None:
    patch = make_patch(upstream, "greet")
    upstream.greet = foreign(upstream.greet)  # type: ignore[attr-defined]
    with pytest.raises(UpstreamChanged, match="strange_wrapper"):
        patch.apply()


def test_a_strangers_wrapper_above_ours_is_detected(upstream: ModuleType) -> None:
    patch = make_patch(upstream, "greet")
    patch.apply()
    assert patch.verify() == "as verified"
    upstream.greet = foreign(upstream.greet)  # type: ignore[attr-defined]
    with pytest.raises(UpstreamChanged, match="strange_wrapper"):
        patch.verify()


def test_a_strangers_wrapper_without_wraps_is_detected(upstream: ModuleType) -> None:
    patch = make_patch(upstream, "greet")
    upstream.greet = lambda name: name  # type: ignore[attr-defined]
    with pytest.raises(UpstreamChanged):
        patch.apply()


def test_below_a_stranger_a_patch_is_not_applied_twice(upstream: ModuleType) -> None:
    patch = make_patch(upstream, "greet")
    patch.apply()
    upstream.greet = foreign(upstream.greet)  # type: ignore[attr-defined]
    patch.apply()
    assert upstream.greet("x") == ("patched", "hello x")


def test_undo_leaves_a_stranger_that_came_later_in_place(upstream: ModuleType) -> None:
    undo = make_patch(upstream, "greet").apply()
    stranger = upstream.greet = foreign(upstream.greet)  # type: ignore[attr-defined]
    undo()
    assert upstream.greet is stranger


def test_two_of_our_patches_share_a_function(upstream: ModuleType) -> None:
    first, second = make_patch(upstream, "greet"), make_patch(upstream, "greet")
    undo_first = first.apply()
    undo_second = second.apply()
    assert upstream.greet("x") == ("patched", ("patched", "hello x"))
    first.verify()
    undo_second()
    undo_first()
    assert upstream.greet("x") == "hello x"


def test_modules_that_imported_the_name_are_rebound_and_restored(
    upstream: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = ModuleType("user_of_upstream")
    user.greet = original = upstream.greet  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "user_of_upstream", user)
    undo = make_patch(upstream, "greet", rebind=("user_of_upstream:greet", "not_imported_yet:greet")).apply()
    assert user.greet("x") == ("patched", "hello x")
    undo()
    assert user.greet is original


def test_a_module_that_holds_something_else_is_an_error_and_changes_nothing(
    upstream: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = upstream.greet
    user = ModuleType("user_of_upstream")
    user.greet = str  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "user_of_upstream", user)
    with pytest.raises(UpstreamChanged, match="user_of_upstream:greet"):
        make_patch(upstream, "greet", rebind=("user_of_upstream:greet",)).apply()
    assert upstream.greet is before


def added(self: Any) -> str:
    return f"added to {type(self).__name__}"


def test_an_addition_takes_effect_once_and_undo_removes_it(upstream: ModuleType) -> None:
    addition = Addition(target=f"{upstream.__name__}:Thing.extra", value=added, **texts())
    assert addition.verify() == "name is free"
    undo = addition.apply()
    addition.apply()()
    assert addition.verify() == "added"
    assert upstream.Thing().extra() == "added to Thing"
    undo()
    assert not hasattr(upstream.Thing, "extra")


@pytest.mark.parametrize("name", ["method", "inherited"])
def test_an_addition_never_replaces_what_is_there(upstream: ModuleType, name: str) -> None:
    addition = Addition(target=f"{upstream.__name__}:Thing.{name}", value=added, **texts())
    with pytest.raises(UpstreamChanged, match="exists already and is not ours"):
        addition.apply()


def test_an_addition_to_a_missing_class_is_an_error() -> None:
    with pytest.raises(UpstreamMissing, match="Gone"):
        Addition(target="collections:Gone.extra", value=added, **texts()).apply()


def test_the_verified_versions_of_a_hook_can_not_be_changed(upstream: ModuleType) -> None:
    with pytest.raises(TypeError):
        make_patch(upstream, "greet").verified["2.0"] = "x"  # type: ignore[index]
