"""Hidden output lengths: the hook, and the proof that no policy can read them (by reading their source)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.prediction.oracle import HIDDEN_LENGTH_KEY
from vllm_ext.simulation.recorded import forced_length
from vllm_ext.simulation.recorded.forced_length import ForcedLengthError, extra_args

PACKAGE = Path(forced_length.__file__).parents[2]
PURE = [PACKAGE / "contract", PACKAGE / "policies", PACKAGE / "prediction"]
"""No module here may see a request's extra arguments at all."""

SCHEDULING = PACKAGE / "scheduling"
ORACLE = PACKAGE / "prediction" / "oracle.py"
READERS = {"from_extra_args", "true_output_tokens"}
"""Whom the scheduler may hand a request's extra arguments: the hints, and the oracle if it is allowed."""

FORBIDDEN_NAMES = {"extra_args", "sampling_params", "true_output_tokens", "HIDDEN_LENGTH_KEY", "forced_length"}


@pytest.fixture
def installed() -> Iterator[None]:
    undo = forced_length.install()
    yield
    undo()


def stopped_after(extra: dict[str, Any] | None, *, max_tokens: int = 10) -> tuple[int, str]:
    """Append tokens one by one to a real vLLM request until the scheduler's check ends it: how many, and why."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched import scheduler
    from vllm.v1.request import Request

    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
    request = Request(request_id="r", prompt_token_ids=[1, 2], sampling_params=sampling, pooling_params=None)
    for count in range(1, 100):
        request.append_output_token_ids(7)
        if scheduler.check_stop(request, 64):
            return count, str(request.get_finished_reason())
    raise AssertionError("the request never ended")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("length", [1, 4, 10])
def test_request_ends_by_itself_at_its_hidden_length(length: int) -> None:
    assert stopped_after(extra_args(length)) == (length, "stop")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("extra", [None, {}, {"osl": 3}], ids=["none", "empty", "hint-only"])
def test_request_without_hidden_length_ends_as_upstream_says(extra: dict[str, Any] | None) -> None:
    assert stopped_after(extra) == (10, "length")


@pytest.mark.usefixtures("installed")
def test_hidden_length_beyond_max_tokens_does_not_raise_that_limit() -> None:
    assert stopped_after(extra_args(50)) == (10, "length")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("value", [0, -1, 2.5, "3", True])
def test_unusable_hidden_length_stops_the_benchmark_instead_of_measuring_something_else(value: Any) -> None:
    with pytest.raises(ForcedLengthError, match=HIDDEN_LENGTH_KEY):
        stopped_after({HIDDEN_LENGTH_KEY: value})
    with pytest.raises(ForcedLengthError, match=HIDDEN_LENGTH_KEY):
        extra_args(value)


def test_second_install_changes_nothing_and_undo_restores_upstream() -> None:
    from vllm.v1.core.sched import scheduler

    original = scheduler.check_stop
    undo = forced_length.install()
    hooked = scheduler.check_stop
    forced_length.install()()
    assert hooked is not original
    assert scheduler.check_stop is hooked
    undo()
    assert scheduler.check_stop is original
    assert stopped_after(extra_args(4)) == (10, "length")


def test_hook_is_verified_with_the_installed_vllm() -> None:
    assert forced_length.PATCH.verify() == "as verified"


def modules(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py") if path != ORACLE)


def test_policies_and_prediction_cannot_read_the_hidden_length() -> None:
    checked = modules(*PURE)
    assert len(checked) > 5, "the folders have moved; this test would prove nothing"
    assert [
        found for path in checked for found in leaks_in_pure_code(path.read_text(encoding="utf-8"), path.name)
    ] == []


def test_scheduler_hands_extra_arguments_only_to_the_hints_and_to_an_allowed_oracle() -> None:
    checked = modules(SCHEDULING)
    assert len(checked) > 3, "the folder has moved; this test would prove nothing"
    assert [
        found for path in checked for found in leaks_in_scheduling(path.read_text(encoding="utf-8"), path.name)
    ] == []


def test_hints_do_not_know_the_hidden_length() -> None:
    source = (PACKAGE / "hints.py").read_text(encoding="utf-8")
    assert list(benchmark_keys(ast.parse(source), "hints.py")) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f(r):\n    return r.sampling_params.extra_args",
        "def f(x):\n    return x['bench_output_len']",
        "from vllm_ext.prediction.oracle import true_output_tokens as peek",
        "import vllm_ext.prediction.oracle",
        "from vllm_ext.prediction import oracle",
        "from vllm_ext.simulation.recorded import forced_length",
        "def f(r):\n    return getattr(r, 'extra_args')",
    ],
)
def test_leak_in_pure_code_would_be_found(source: str) -> None:
    assert leaks_in_pure_code(source, "planted.py")


@pytest.mark.parametrize(
    "source",
    [
        "def f(r, views):\n    extra_args = r.params.extra_args\n    views.append(extra_args)",
        "def f(r):\n    return r.params.extra_args['n']",
        "def f(r):\n    extra_args = r.params.extra_args\n    return true_output_tokens(extra_args)",
        "def f(self, x):\n    return true_output_tokens(x) if self.use_anything else None",
        "def f(self, x):\n    return None if self.use_oracle else true_output_tokens(x)",
        "KEY = 'bench_output_len'",
    ],
)
def test_leak_in_the_scheduler_would_be_found(source: str) -> None:
    assert leaks_in_scheduling(source, "planted.py")


def test_permitted_uses_in_the_scheduler_are_not_reported() -> None:
    source = (
        "def f(self, params):\n"
        "    extra_args = params.extra_args if params is not None else None\n"
        "    hints = from_extra_args(extra_args, None)\n"
        "    return true_output_tokens(extra_args) if self.use_oracle else None\n"
    )
    assert leaks_in_scheduling(source, "sound.py") == []


@dataclass(frozen=True)
class Leak:
    """A place in the source at which the hidden length could be read."""

    file: str
    line: int
    what: str


def leaks_in_pure_code(source: str, file: str) -> list[Leak]:
    tree = ast.parse(source)
    found = list(benchmark_keys(tree, file))
    for node in ast.walk(tree):
        found += (
            Leak(file, getattr(node, "lineno", 0), name)
            for name in names_in(node)
            if not FORBIDDEN_NAMES.isdisjoint(name.split(".")) or name.split(".")[-1] == "oracle"
        )
    return found


def leaks_in_scheduling(source: str, file: str) -> list[Leak]:
    tree = ast.parse(source)
    found = list(benchmark_keys(tree, file))
    passed_on = {
        id(argument)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in READERS
        for argument in call.args
    }
    assigned = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["extra_args"]
        for part in ([node.value.body] if isinstance(node.value, ast.IfExp) else [node.value])
    }
    asked_when_allowed = {
        id(node.body) for node in ast.walk(tree) if isinstance(node, ast.IfExp) and ends_with(node.test, "use_oracle")
    }
    for node in ast.walk(tree):
        named = isinstance(node, ast.Name) and node.id == "extra_args" and isinstance(node.ctx, ast.Load)
        read = isinstance(node, ast.Attribute) and node.attr == "extra_args" and id(node) not in assigned
        asked = isinstance(node, ast.Call) and ends_with(node.func, "true_output_tokens")
        if ((named or read) and id(node) not in passed_on) or (asked and id(node) not in asked_when_allowed):
            found.append(Leak(file, node.lineno, ast.unparse(node)))
    return found


def ends_with(expression: ast.expr, name: str) -> bool:
    return ast.unparse(expression).split(".")[-1] == name


def benchmark_keys(tree: ast.Module, file: str) -> Iterator[Leak]:
    """Texts that name a benchmark's key or the extra arguments, docstrings and other bare texts excepted."""
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in bare else None
        if isinstance(text, str) and (text.startswith("bench_") or text == "extra_args"):
            yield Leak(file, node.lineno, repr(text))


def names_in(node: ast.AST) -> list[str]:
    """Dotted names that a syntax node mentions by itself."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []
