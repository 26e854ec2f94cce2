"""Everything that can be reached from an object, as a text that differs when anything has changed."""

from __future__ import annotations

import ctypes
import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

_PLAIN = (str, bytes, int, float, bool, type(None), Enum, range)
_OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType)


def fingerprint(*roots: Any) -> str:
    """Return a digest of all that the roots hold, in the order in which they hold it, sets excepted."""
    seen: dict[int, int] = {}
    digest = hashlib.blake2b()
    keep: list[Any] = []  # an id stands for an object only as long as that lives
    stack: list[Any] = list(reversed(roots))
    while stack:
        item = stack.pop()
        if isinstance(item, _PLAIN):
            digest.update(repr(item).encode())
        elif isinstance(item, _OPAQUE):
            digest.update(repr(getattr(item, "__qualname__", item)).encode())
        elif id(item) in seen:
            digest.update(f"@{seen[id(item)]}".encode())
        else:
            seen[id(item)] = len(seen)
            keep.append(item)
            parts = list(_parts(item))
            digest.update(f"{type(item).__name__}:{len(parts)}".encode())
            stack.extend(reversed(parts))
    return digest.hexdigest()


def _parts(item: Any) -> Iterator[Any]:
    if isinstance(item, dict):
        for key, value in item.items():
            yield key
            yield value
    elif isinstance(item, (set, frozenset)):
        yield sorted(map(repr, item))
        return
    elif isinstance(item, (list, tuple, deque)):
        yield from item
    elif isinstance(item, ctypes.Structure):
        for name, *_ in item._fields_:
            yield getattr(item, name)
        return
    elif isinstance(item, MethodType):
        yield from (item.__self__, item.__func__)
        return
    for name in sorted(_names(item)):
        yield name
        yield getattr(item, name, None)


def _names(item: Any) -> Iterable[str]:
    names = set(getattr(item, "__dict__", ()))
    for cls in type(item).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names |= {slots} if isinstance(slots, str) else set(slots)
    return names - {"__dict__", "__weakref__"}
