"""Policies of the user's own, from a file: ``my_policy.py:MyOrdering`` takes its axis of the chosen system."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from vllm_ext.config import ConfigError
from vllm_ext.contract import Admission, Budget, GatePolicy, Ordering, Residency, Sharing
from vllm_ext.systems.system import System, fields_of

BASES: dict[str, type] = {
    "ordering": Ordering,
    "admission": Admission,
    "gates": GatePolicy,
    "budget": Budget,
    "residency": Residency,
    "sharing": Sharing,
}
"""What a policy of each axis is derived from, by the field of `System`."""


def with_own(system: System, named: Sequence[str]) -> System:
    """Return the row with the policies that files bring: each takes its axis, a gate stands beside the row's gates.

    What the row sets of the parameters of a policy that is replaced goes with it.

    Args:
        system: A row of the table, or a composition.
        named: ``FILE.py:CLASS`` each.

    Raises:
        ConfigError: a file or a class cannot be used, or two are for one axis.
    """
    taken: dict[str, str] = {}
    for text in named:
        policy = load(text)
        field = next(field for field, base in BASES.items() if issubclass(policy, base))
        if field == "gates":
            system = dataclasses.replace(system, gates=(*system.gates, policy))
            continue
        if field in taken:
            raise ConfigError("policies", text, f"one policy per axis; {taken[field]} sets {field} as well")
        taken[field] = text
        kept = {name: value for name, value in system.parameters.items() if name != field}
        if field == "admission":  # which holds those of the gates too
            of_gates = {name for gate in system.gates for name in fields_of(gate)}
            kept[field] = {k: v for k, v in system.parameters.get(field, {}).items() if k in of_gates}
        changes: dict[str, Any] = {field: policy, "parameters": kept}
        system = dataclasses.replace(system, **changes)
    return system


def split(text: str) -> tuple[Path, str]:
    """Return the file and the name of the class.

    Raises:
        ConfigError: the text has another form.
    """
    path, colon, name = text.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        raise ConfigError("policies", text, "must be FILE.py:CLASS, such as my_policy.py:MyOrdering")
    return Path(path), name


def load(text: str) -> type:
    """Return the class, importing its file; what lies beside the file can be imported by it.

    Raises:
        ConfigError: there is no such file or class, the file cannot be imported, or the class is no policy.
    """
    path, name = split(text)
    try:
        module = _module(path)
    except OSError as error:
        raise ConfigError("policies", text, f"a file that can be read ({error})") from error
    except Exception as error:  # whatever the file's own code raises
        allowed = f"a file that can be imported ({type(error).__name__}: {error})"
        raise ConfigError("policies", text, allowed) from error
    bases = tuple(BASES.values())
    own = {key: value for key, value in vars(module).items() if _is_own(value, module, bases)}
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, bases)):
        known = ", ".join(own) or "none is there"
        wanted = ", ".join(base.__name__ for base in bases)
        raise ConfigError("policies", text, f"a class of the file that is derived from {wanted}; found: {known}")
    return found


def _is_own(value: object, module: ModuleType, bases: tuple[type, ...]) -> bool:
    return isinstance(value, type) and issubclass(value, bases) and value.__module__ == module.__name__


def _module(path: Path) -> ModuleType:
    """Import a file once for each content: a name that depends on it is given to the module."""
    content = path.read_bytes()
    digest = hashlib.sha256(str(path.resolve()).encode() + b"\0" + content).hexdigest()[:12]
    name = f"vllm_ext_own_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(folder)
    return module
