"""Everything that can be reached from an object, as a text that differs when anything has changed."""

from __future__ import annotations

import ctypes
import gc
import hashlib
from enum import Enum
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

_PLAIN = (str, bytes, int, float, bool, type(None), Enum, range)
_OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType)


def fingerprint(*roots: Any) -> str:
    """Return a digest of all that the roots hold, in the order in which they hold it."""
    seen: dict[int, int] = {}
    digest = hashlib.blake2b()
    keep: list[Any] = []  # an id stands for an object only as long as that lives
    stack = list(roots)
    while stack:
        item = stack.pop()
        if isinstance(item, _PLAIN):
            digest.update(repr(item).encode())
        elif isinstance(item, _OPAQUE):
            digest.update(item.__name__.encode())
        elif id(item) in seen:
            digest.update(f"@{seen[id(item)]}".encode())
        else:
            seen[id(item)] = len(seen)
            keep.append(item)
            fields = isinstance(item, ctypes.Structure)
            parts = [getattr(item, name) for name, *_ in item._fields_] if fields else gc.get_referents(item)
            digest.update(f"{type(item).__name__}:{len(parts)}".encode())
            stack += parts
    return digest.hexdigest()
