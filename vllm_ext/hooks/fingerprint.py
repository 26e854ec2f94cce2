"""Fingerprints of upstream functions: equal when the code is the same, on every Python this package supports.

A fingerprint is the first 16 hex digits of the SHA-256 of the function's syntax tree, without docstring, positions and
fields that are empty (newer Pythons add some). A function that something wraps has the code names of the wrappers
appended, outermost first: ``inspect`` looks through ``__wrapped__``, and by the body alone a stranger's patch passes.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_SKIPPED_FIELDS = frozenset({"type_params", "type_comment", "type_ignores", "kind"})
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_hashes: WeakKeyDictionary[FunctionType, tuple[CodeType, str]] = WeakKeyDictionary()
"""Hashes of live functions, each with the code it was made of: parsing a file takes far longer than all else here."""


def fingerprint(function: Callable[..., Any], *, ignore: Callable[[Any], bool] = lambda _: False) -> str:
    """Return the fingerprint of a live function.

    Args:
        function: A plain function, perhaps wrapped by others that set ``__wrapped__``.
        ignore: Tells the wrappers that do not count, such as our own.

    Raises:
        LookupError: Its source can't be found, so nothing can be said about it.
    """
    names = []
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        if not ignore(function):
            names.append(_code_name(function))
        function = inner
    return "+".join([_live_hash(function), *names])


def hash_function(node: FunctionNode) -> str:
    """Return the fingerprint of a function's syntax tree."""
    digest = hashlib.sha256()
    for piece in _dump(node):
        digest.update(piece.encode())
    return digest.hexdigest()[:16]


def forget_sources() -> None:
    """Drop the syntax trees kept between calls of `fingerprint`; they are large and seldom needed again."""
    _functions_of.cache_clear()


def _dump(node: object) -> Iterator[str]:
    """Yield the tree as text in which nothing depends on the version of Python that parsed it."""
    if isinstance(node, ast.JoinedStr):
        node = ast.JoinedStr(values=_merge_texts(node.values))
    if isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name in sorted(node._fields):
            value = getattr(node, name, None)
            if name == "body" and isinstance(node, DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
                value = node.body[1:]
            if name in _SKIPPED_FIELDS or (value is None and not isinstance(node, ast.Constant)) or value == []:
                continue
            yield f" {name}="
            yield from _dump(value)
        yield ")"
    elif isinstance(node, list):
        yield "["
        for item in node:
            yield from _dump(item)
            yield ","
        yield "]"
    else:
        yield ascii(node)  # not repr: which characters it escapes depends on the Unicode tables


def _merge_texts(values: list[ast.expr]) -> list[ast.expr]:
    """Join neighbouring literal parts of an f-string; parsers cut them differently."""
    merged: list[ast.expr] = []
    for value in values:
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            if not value.value:
                continue
            last = merged[-1] if merged else None
            if isinstance(last, ast.Constant) and isinstance(last.value, str):
                merged[-1] = ast.Constant(value=last.value + value.value)
                continue
        merged.append(value)
    return merged


def _code_name(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return code.co_name if code is not None else type(function).__name__


def _live_hash(function: Callable[..., Any]) -> str:
    if not isinstance(function, FunctionType):
        raise LookupError(f"{function!r} is no plain function")
    code = function.__code__
    known, found = _hashes.get(function, (None, ""))
    if known is not code:
        found = hash_function(_parsed(function.__qualname__, code))
        _hashes[function] = code, found
    return found


def _parsed(name: str, code: CodeType) -> FunctionNode:
    filename = inspect.getsourcefile(code)
    node = _functions_of(filename).get((code.co_name, code.co_firstlineno)) if filename else None
    if node is None:
        raise LookupError(f"no source found for {name} (line {code.co_firstlineno} of {filename})")
    return node


@functools.lru_cache(maxsize=16)
def _functions_of(filename: str) -> dict[tuple[str, int], FunctionNode]:
    """Return the functions in a file by name and first line, decorators included, as code objects count it."""
    try:
        tree = ast.parse(Path(filename).read_bytes())
    except (OSError, SyntaxError) as error:
        raise LookupError(f"{filename} can't be read as source: {error}") from error
    functions = {}
    for node in ast.walk(tree):
        if isinstance(node, FunctionNode):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            functions[node.name, first] = node
    return functions
