"""Fingerprints of functions in sources that are not imported: an unpacked tree, a wheel or an sdist."""

from __future__ import annotations

import ast
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_ext.hooks.fingerprint import DEFINITIONS, FunctionNode, hash_function


def fingerprint_source(text: str, qualname: str) -> str:
    """Return the fingerprint of ``qualname`` (``function`` or ``Class.method``) in the source text of a module.

    Wrappers that decorators add are not seen here.

    Raises:
        LookupError: The text does not define it.
    """
    body: Sequence[ast.AST] = ast.parse(text).body
    node: ast.AST | None = None
    for name in qualname.split("."):
        found = [n for n in _definitions(body) if n.name == name]
        if not found:
            raise LookupError(f"{qualname} is not defined here")
        node = found[-1]  # the last definition of a name wins
        body = node.body
    if not isinstance(node, FunctionNode):
        raise LookupError(f"{qualname} is no function")
    return hash_function(node)


def read_module(source: Path, module: str) -> str:
    """Return the text of a module in an unpacked tree, a wheel or an sdist.

    Raises:
        LookupError: ``source`` does not hold the module.
    """
    path = module.replace(".", "/")
    names = (f"{path}.py", f"{path}/__init__.py")
    if source.is_dir():
        for name in names:
            if (source / name).is_file():
                return (source / name).read_text(encoding="utf-8")
    elif zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as wheel:
            for name in names:
                if name in wheel.namelist():
                    return wheel.read(name).decode()
    else:
        with tarfile.open(source) as sdist:
            for member in sdist:
                if member.name.partition("/")[2] in names and (file := sdist.extractfile(member)) is not None:
                    return file.read().decode()
    raise LookupError(f"{source} holds no module {module}")


def _definitions(body: Sequence[ast.AST]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Yield definitions in these statements, also those below ``if`` and ``try``, but not inside one another."""
    for statement in body:
        if isinstance(statement, DEFINITIONS):
            yield statement
        else:
            yield from _definitions([n for n in ast.iter_child_nodes(statement) if isinstance(n, ast.stmt)])
            if isinstance(statement, ast.Try):
                for handler in statement.handlers:
                    yield from _definitions(handler.body)
